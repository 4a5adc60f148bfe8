"""Binds a plan to the module that it was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack

import attrs
from torch import nn

from trainwright.checkpointing.errors import PlanError

from .following import Store, follow
from .planning.plan import ChainPlan, Plan
from .policy import RecomputeOptions


def apply(
    module: nn.Module | Iterable[nn.Module],
    plan: Plan,
    stores: Mapping[str, Store] | None = None,
    **options: Unpack[RecomputeOptions],
) -> Callable[..., Any]:
    """Return a function that calls ``module`` as ``plan`` says; the module is left as it is.

    Args:
        module: For a `ChainPlan`, an `nn.Sequential`, an `nn.ModuleList` or layers in order, each
            called ``layer(hidden, *args, **kwargs)``.
        plan: By a planner, by hand or read from JSON.
        stores: What the names in the plan stand for, as in `follow`.
        options: As in `Recomputed`.

    Raises:
        PlanError: The plan does not fit the module, or a name in it stands for nothing.
    """
    if not isinstance(plan, ChainPlan):
        raise PlanError("not yet")
    if isinstance(module, nn.Module) and not isinstance(module, (nn.Sequential, nn.ModuleList)):
        raise PlanError(
            f"a plan of a chain runs an nn.Sequential, an nn.ModuleList or layers in order, got "
            f"{type(module).__name__}; give its layers"
        )
    layers = tuple(module)
    if len(layers) != plan.num_layers:
        raise PlanError(f"the plan is of {plan.num_layers} layers, the module has {len(layers)}")
    return _Applied(layers, follow(plan, stores, **options))


@attrs.frozen(eq=False)
class _Applied:
    layers: tuple[nn.Module, ...]
    runner: Callable[..., Any]

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return self.runner(self.layers, hidden, *args, **kwargs)
