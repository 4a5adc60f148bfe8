"""Recomputes layers but for the results of chosen operators, which are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import attrs
import torch
from torch import nn
from torch._ops import OpOverload

from trainwright.checkpointing.errors import PolicyError
from trainwright.checkpointing.protocol import Keeper

from .kept_operators import KeptOperators, OperatorReport
from .operators import Operators, named, products_with_weights, short_name
from .policy import RecomputeEvery, RecomputeOptions, recompute_all, recomputed
from .reach import Segment


@attrs.frozen
class KeptByName:
    """Keeps every result of the operators named.

    Args:
        choices: Operators, and who holds their results; None: they stay as they are.
    """

    choices: tuple[tuple[Operators, Keeper | None], ...]

    def may_keep(self, operator: OpOverload) -> bool:
        """Whether the operator is one of those named."""
        return any(operator in operators.overloads for operators, _ in self.choices)

    def keeps(self, operator: OpOverload, number: int) -> tuple[bool, Keeper | None]:
        """Return that it is kept, and who holds it."""
        found = (keeper for operators, keeper in self.choices if operator in operators.overloads)
        return True, next(found)


@attrs.frozen
class SelectiveRecompute:
    """Recomputes each layer but for chosen operators, whose results are kept besides its input.

    Views cost nothing and are made again, and so is what draws random numbers, which is replayed.
    Of an operator that runs on something recomputed, the recomputation begins at what is kept.

    Args:
        rule: The operators that are kept.
        options: How layers are recomputed.
        report: Counts what was kept and what was recomputed, by operator.
    """

    rule: KeptByName
    options: RecomputeEvery = attrs.field(factory=recompute_all, kw_only=True)
    report: OperatorReport | None = attrs.field(default=None, kw_only=True, eq=False)

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer, bitwise that of `KeepAll`.

        Raises:
            PolicyError: An operator that was named did not run in any of the layers.
        """
        stack = list(layers)
        seen: set[OpOverload] = set()
        for number, layer in enumerate(stack):
            kept = KeptOperators(self.rule, self.report)
            region = recomputed(Segment((layer,), number), self.options)
            hidden = region.run(kept, (hidden, *args), kwargs)
            seen |= kept.seen
        if stack and torch.is_grad_enabled():
            self._require_matches(seen)
        return hidden

    def _require_matches(self, seen: set[OpOverload]) -> None:
        for operators, _ in self.rule.choices:
            if not operators.overloads & seen:
                others = ", ".join(sorted(map(short_name, seen))) or "none of those named"
                raise PolicyError(
                    f"{operators.name!r} is to be kept, but no layer runs it, so that all would be "
                    f"recomputed; what ran of those named: {others}. An OperatorReport counts all "
                    "that is recomputed"
                )


def recompute_except(
    operators: Iterable[object] | Mapping[str, Keeper | None],
    *,
    report: OperatorReport | None = None,
    **options: Unpack[RecomputeOptions],
) -> SelectiveRecompute:
    """Return the policy that recomputes each layer but for the operators listed.

    Args:
        operators: As `operators_named` takes them, or a mapping from these to who holds the
            results, such as ``{"mm": None, "gelu": Compress(BlockInt8())}``.
        report: Counts what was kept and what was recomputed.
        options: As in `Recomputed`.

    Raises:
        PolicyError: There is no such operator, or its results can never be kept.
    """
    names = named(operators)
    if not names:
        raise PolicyError("no operator is named, so that all is recomputed; take recompute_all()")
    given = operators if isinstance(operators, Mapping) else {}
    keepers: list[Keeper | None] = [given.get(each) for each in given] or [None] * len(names)
    rule = KeptByName(tuple(zip(names, keepers, strict=True)))
    return SelectiveRecompute(rule, options=recompute_all(**options), report=report)


def selective(
    *, report: OperatorReport | None = None, **options: Unpack[RecomputeOptions]
) -> SelectiveRecompute:
    """Return the policy that keeps matrix products and recomputes the rest ("selective").

    Recomputed are the attention core (also where it is written as batched products), norms,
    activation functions, dropout: much memory for little computing.

    Source: Korthikanti et al., Reducing Activation Recomputation (arXiv 2205.05198), section 5,
    which recomputes the attention core only.
    """
    rule = KeptByName(((products_with_weights(), None),))
    return SelectiveRecompute(rule, options=recompute_all(**options), report=report)
