"""Runs layers as a plan of a chain says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Unpack

import attrs
import torch
from torch import nn

from trainwright.checkpointing.errors import PlanError, PolicyError
from trainwright.checkpointing.protocol import Keeper

from .arguments import take_apart
from .compress import Compress, codec_named
from .holding import Holding, current_holding, parameters_of
from .kept_operators import KeptOperators, OperatorRule
from .offload import offload_to_cpu
from .planning.plan import ChainPlan, Item, Kept, layers_of
from .policy import RecomputeEvery, RecomputeOptions, recompute_all, recomputed
from .reach import Segment
from .selective import selective

Store = Keeper | OperatorRule


def default_store(name: str) -> Store:
    """Return what a plan's choice of this name does: ``cpu``, a codec's name, or ``selective``.

    Every tensor is held, whatever its size, and nothing comes back before it is asked for, so that
    a plan's count of bytes holds.

    Raises:
        PlanError: The name is another one.
    """
    if name == "cpu":
        return offload_to_cpu(ahead=0)
    if name == "selective":
        return selective().rule
    try:
        return Compress(codec_named(name), min_bytes=0)
    except PolicyError as error:
        raise PlanError(
            f"the plan makes use of {name!r}; say what that is: stores={{{name!r}: ...}}, a keeper "
            "or a rule of operators"
        ) from error


@attrs.frozen
class PlannedLayers:
    """Runs layers as a plan says: some kept, some in nested regions, some held elsewhere.

    Args:
        plan: Of as many layers as are run.
        stores: What the names in the plan stand for: who holds tensors, or which operators are
            kept of a layer that is otherwise recomputed.
        options: How regions are recomputed.
    """

    plan: ChainPlan
    stores: Mapping[str, Store] = attrs.field(factory=dict, kw_only=True)
    options: RecomputeEvery = attrs.field(factory=recompute_all, kw_only=True)

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer, bitwise that of `KeepAll` unless it compresses.

        Raises:
            PlanError: The plan is of another number of layers.
        """
        stack = tuple(layers)
        if len(stack) != self.plan.num_layers:
            raise PlanError(
                f"the plan is of {self.plan.num_layers} layers, got {len(stack)}; plan for these"
            )
        if not torch.is_grad_enabled():
            return Segment(stack, 0)(hidden, *args, **kwargs)
        return self.run(self.plan.items, stack, 0, (hidden, *args), kwargs)

    def run(
        self,
        items: tuple[Item, ...],
        layers: tuple[nn.Module, ...],
        first: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run ``items``, whose first layer is ``layers[0]``, number ``first`` of the chain."""
        hidden, *others = args
        for item in items:
            numbers = list(layers_of((item,)))
            segment = Segment(layers[numbers[0] - first : numbers[-1] + 1 - first], numbers[0])
            hidden = self._run_item(item, segment, (hidden, *others), kwargs)
        return hidden

    def _run_item(
        self, item: Item, segment: Segment, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        store = self._store(item.store)
        keeper = store if isinstance(store, Keeper) else None
        if isinstance(item, Kept):
            if keeper is not None:
                with _holding(keeper, segment, args, kwargs):
                    return segment(*args, **kwargs)
            if store is None:
                return segment(*args, **kwargs)
            kept = KeptOperators(store)  # type: ignore[arg-type]
            return recomputed(segment, self.options).run(kept, args, kwargs)
        if any(not isinstance(inner, Kept) for inner in item.items):
            segment = attrs.evolve(segment, runner=_Inner(self, item.items, segment.first))
        region = recomputed(segment, self.options)
        if keeper is not None:
            region = attrs.evolve(region, inputs=keeper)
        return region(*args, **kwargs)

    def _store(self, name: str) -> Store | None:
        if not name:
            return None
        return self.stores[name] if name in self.stores else default_store(name)


def follow(
    plan: ChainPlan,
    stores: Mapping[str, Store] | None = None,
    **options: Unpack[RecomputeOptions],
) -> PlannedLayers:
    """Return the policy that runs layers as ``plan`` says.

    Args:
        plan: By a planner, by hand or read from JSON.
        stores: What the names in the plan stand for, `default_store` where they are left out.
        options: As in `Recomputed`.

    Raises:
        PlanError: A name in the plan stands for nothing, or a store is neither a keeper nor a rule.
    """
    named = dict(stores or {})
    found = {name: named.get(name) or default_store(name) for name in sorted(plan.stores)}
    for name, store in found.items():
        if isinstance(store, type) or not (isinstance(store, Keeper) or hasattr(store, "may_keep")):
            raise PlanError(
                f"store {name!r} must be a keeper or a rule of operators, got {store!r}"
            )
    return PlannedLayers(plan, stores=found, options=recompute_all(**options))


@attrs.frozen(eq=False)
class _Inner:
    """Runs the layers of a region as its items say."""

    planned: PlannedLayers
    items: tuple[Item, ...]
    first: int

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        return self.planned.run(self.items, tuple(layers), self.first, (hidden, *args), kwargs)


def _holding(
    keeper: Keeper, segment: Segment, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AbstractContextManager[object]:
    """Let a keeper hold what a layer saves, but for parameters and what all layers are given."""
    shared: list[torch.Tensor] = []
    take_apart((args[1:], kwargs), shared)
    excluded = parameters_of(segment.layers) + shared
    return Holding(keeper, excluded, current_holding()).hooks()
