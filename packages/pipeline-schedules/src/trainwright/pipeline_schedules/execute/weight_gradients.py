"""The weight gradients that are still owed: filled by I, emptied by W, empty after a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.labels import module_labels
from trainwright.pipeline_schedules.execute.protocol import Gradients, SplitOperation
from trainwright.pipeline_schedules.execute.transfers import Slot

# Small products share a node, which costs more than they do; together they hold no more than this.
_NODE_BYTES = 1 << 18


@attrs.define(eq=False)
class Owed:
    """One operation whose weight gradients are owed.

    Args:
        operation: What computes them.
        context: Its context, with all that this takes.
        gradients: Of its outputs.
        weights: Those that are trained and where they go, through casts and views.
        wanted: Which of the operation's weights these are.
        parameters: What they are, or are made of; to name them.
    """

    operation: type[SplitOperation]
    context: Any
    gradients: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    wanted: tuple[bool, ...]
    parameters: tuple[nn.Parameter, ...]

    def compute(self) -> list[torch.Tensor | None]:
        """The gradients of ``weights``.

        Raises:
            PipelineError: What they are computed from was changed meanwhile.
        """
        self.context.require_unchanged()
        found = self.operation.weight_gradient(self.context, *self.gradients)
        return [g for g, is_wanted in zip(found, self.wanted, strict=True) if is_wanted]


class WeightGradients:
    """What each microbatch of each split stage owes; one object an executor.

    I fills it between `collecting` and its end, W empties it with `pay`. Only input and gradient
    of each product wait here: of a weight no more than where its gradient goes.
    """

    def __init__(self) -> None:
        self._owed: dict[Slot, list[_Debt]] = {}
        self._collected: list[Owed] | None = None
        self._ones: dict[torch.device, torch.Tensor] = {}

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The stages and microbatches that owe something."""
        return tuple(self._owed)

    def add(self, owed: Owed) -> None:
        """Owe what an operation's backward leaves out.

        Raises:
            PipelineError: No I is running.
        """
        if self._collected is None:
            raise PipelineError(
                f"a {owed.operation.__name__} of a stage whose backward is split was asked for "
                f"gradients outside of I; a stage that computes gradients in its forward needs a "
                f"schedule of F and B"
            )
        self._collected.append(owed)

    @contextmanager
    def collecting(self, slot: Slot) -> Iterator[None]:
        """Keep what the backward within owes for the W of a stage and microbatch."""
        collected: list[Owed] = []
        self._collected = collected
        try:
            yield
        finally:
            self._collected = None
        if collected:
            # Autograd runs what was made last first; so a weight that is used several times adds
            # its gradients up in the order of a whole backward.
            self._owed[slot] = [_debt(group) for group in reversed(_groups(collected))]

    def pay(self, slot: Slot) -> int:
        """Compute what a stage and microbatch owes and add it to ``.grad``.

        Returns:
            How many nodes of autograd that took.
        """
        # As in a whole backward, what was frozen since its forward gets nothing.
        debts = [debt for debt in self._owed.pop(slot, []) if debt.token.requires_grad]
        if debts:
            tokens = [debt.token for debt in debts]
            torch.autograd.backward(tokens, [self._one_on(token.device) for token in tokens])
        return len(debts)

    def clear(self) -> None:
        """Forget everything, after a failure."""
        self._owed.clear()

    def require_empty(self, stages: Mapping[int, nn.Module]) -> None:
        """Refuse to end a step with gradients that nobody computed.

        Raises:
            PipelineError: Something is owed; names the modules.
        """
        if not self._owed:
            return
        labels = module_labels(stages)
        owing = {
            f"{labels.get(parameter, 'a module of no stage')} (microbatch {microbatch})"
            for (_, microbatch), debts in self._owed.items()
            for debt in debts
            for parameter in debt.parameters
        }
        self.clear()
        raise PipelineError(
            f"the step ended without the weight gradients of {', '.join(sorted(owing))}; each I "
            f"of a schedule needs its W"
        )

    def _one_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._ones:
            self._ones[device] = torch.ones((), dtype=torch.float32, device=device)
        return self._ones[device]


@attrs.frozen(eq=False)
class _Debt:
    """A node of autograd that computes weight gradients when its token is asked for one."""

    token: torch.Tensor
    parameters: tuple[nn.Parameter, ...]


def _debt(group: Sequence[Owed]) -> _Debt:
    weights = [weight for owed in group for weight in owed.weights]
    parameters = tuple(parameter for owed in group for parameter in owed.parameters)
    token: torch.Tensor = _Payment.apply(list(group), *weights)  # type: ignore[no-untyped-call]
    for owed in group:
        # From here on autograd knows where they go, and a cast need not be kept.
        owed.weights = ()
    return _Debt(token, parameters)


def _groups(collected: Iterable[Owed]) -> list[list[Owed]]:
    """Neighbours whose gradients are small together."""
    groups: list[list[Owed]] = []
    room = 0
    for owed in collected:
        size = sum(weight.nbytes for weight in owed.weights)
        if size > room or not groups:
            groups.append([])
            room = _NODE_BYTES
        groups[-1].append(owed)
        room -= size
    return groups


class _Payment(torch.autograd.Function):
    """Nothing, made of weights, whose backward is their gradients."""

    @staticmethod
    def forward(ctx: Any, group: list[Owed], *weights: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        device = group[0].gradients[0].device
        return torch.empty((), dtype=torch.float32, device=device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Gradients:
        group: list[Owed] = ctx.group
        computed: list[torch.Tensor | None] = [None]
        while group:
            # Popped, so that what each product needs is freed with it.
            computed += group.pop(0).compute()
        return tuple(computed)
