"""Binds a plan to the module that it was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import attrs
from torch import nn
from torch._ops import OpOverload

from trainwright.checkpointing.errors import PlanError
from trainwright.checkpointing.protocol import Keeper

from .following import Store, default_store, follow
from .kept_operators import KeptOperators
from .operators import short_name
from .planning.plan import ChainPlan, OperatorPlan, Plan
from .policy import RecomputeOptions
from .recompute import Recomputed


def apply(
    module: Callable[..., Any] | Iterable[nn.Module],
    plan: Plan,
    stores: Mapping[str, Store] | None = None,
    **options: Unpack[RecomputeOptions],
) -> Callable[..., Any]:
    """Return a function that calls ``module`` as ``plan`` says; the module is left as it is.

    Args:
        module: For a `ChainPlan`, an `nn.Sequential`, an `nn.ModuleList` or layers in order, each
            called ``layer(hidden, *args, **kwargs)``. For an `OperatorPlan`, what was profiled: a
            module or a function.
        plan: By a planner, by hand or read from JSON.
        stores: What the names in the plan stand for, as in `follow`.
        options: As in `Recomputed`.

    Raises:
        PlanError: The plan does not fit the module, or a name in it stands for nothing.
    """
    if isinstance(plan, OperatorPlan):
        if not callable(module):
            raise PlanError(f"a plan of operators runs a module or a function, got {module!r}")
        return _AppliedOperators(Recomputed(module, **options), _rule_of(plan, dict(stores or {})))
    if not isinstance(plan, ChainPlan):
        raise PlanError(f"apply needs a ChainPlan or an OperatorPlan, got {plan!r}")
    if not isinstance(module, Iterable):
        raise PlanError(
            f"a plan of a chain runs an nn.Sequential, an nn.ModuleList or layers in order, got "
            f"{type(module).__name__}; give its layers"
        )
    layers = tuple(module)
    if len(layers) != plan.num_layers:
        raise PlanError(f"the plan is of {plan.num_layers} layers, the module has {len(layers)}")
    return _AppliedChain(layers, follow(plan, stores, **options))


@attrs.frozen(eq=False)
class _AppliedChain:
    layers: tuple[nn.Module, ...]
    runner: Callable[..., Any]

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return self.runner(self.layers, hidden, *args, **kwargs)


@attrs.frozen
class _PlannedOperators:
    """Keeps the runs of operators that a plan names, each by its operator and its number."""

    operators: frozenset[str]
    runs: Mapping[str, Keeper | None]

    def may_keep(self, operator: OpOverload) -> bool:
        return short_name(operator) in self.operators

    def keeps(self, operator: OpOverload, number: int) -> tuple[bool, Keeper | None]:
        name = f"{short_name(operator)}.{number}"
        return name in self.runs, self.runs.get(name)


@attrs.frozen(eq=False)
class _AppliedOperators:
    recomputed: Recomputed
    rule: _PlannedOperators

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = KeptOperators(self.rule)
        output = self.recomputed.run(kept, args, kwargs)
        ran = {short_name(operator) for operator in kept.seen}
        if kept.seen and (missing := self.rule.operators - ran):
            raise PlanError(
                f"the plan keeps results of {sorted(missing)}, which did not run; plan for what is "
                "called, with inputs of the same kind"
            )
        return output


def _rule_of(plan: OperatorPlan, stores: dict[str, Store]) -> _PlannedOperators:
    runs: dict[str, Keeper | None] = {}
    for each in plan.decisions:
        if each.action != "keep":
            continue
        if not each.store:
            runs[each.name] = None
            continue
        store = stores.get(each.store) or default_store(each.store)
        if not isinstance(store, Keeper):
            raise PlanError(f"store {each.store!r} must be a keeper, got {store!r}")
        runs[each.name] = store
    return _PlannedOperators(frozenset(name.rpartition(".")[0] for name in runs), runs)
