"""Executes plans symbolically: storages come and go as in a real step, and time adds up."""

from __future__ import annotations

import attrs

from trainwright.checkpointing.errors import PlanError

from .choices import Choice, Partial
from .costs import ChainCosts, Costs, LayerCost, OperatorCosts
from .plan import ChainPlan, Item, Kept, Plan, layers_of
from .simulate_operators import OperatorSimulation, simulate_operators


@attrs.frozen
class Simulation:
    """What a plan does to a chain.

    Args:
        time_s: Forward, backward, recomputation and choices of all layers.
        peak_bytes: Most bytes at any time: what is saved, and the temporaries of what runs.
        held_bytes: Bytes saved when the forward has ended.
        runs: How often each layer runs forward.
    """

    time_s: float
    peak_bytes: int
    held_bytes: int
    runs: tuple[int, ...]


def simulate(plan: Plan, costs: Costs) -> Simulation | OperatorSimulation:
    """Return what ``plan`` does to what has these costs.

    Raises:
        PlanError: The plan is for something else, or recomputes what cannot be repeated.
    """
    if isinstance(plan, ChainPlan) and isinstance(costs, ChainCosts):
        return simulate_chain(plan, costs)
    if not isinstance(plan, ChainPlan) and isinstance(costs, OperatorCosts):
        return simulate_operators(plan, costs)
    raise PlanError(
        f"a {type(plan).__name__} cannot be simulated on {type(costs).__name__}; "
        "plans of chains go with ChainCosts, plans of operators with OperatorCosts"
    )


def simulate_chain(plan: ChainPlan, costs: ChainCosts) -> Simulation:
    """Return what ``plan`` does to a chain of these costs.

    Raises:
        PlanError: The plan has another number of layers, names a choice that is not offered, or
            recomputes a layer that cannot be.
    """
    if plan.num_layers != len(costs.layers):
        raise PlanError(
            f"the plan has {plan.num_layers} layers, the costs are of {len(costs.layers)}"
        )
    machine = _Machine(costs, plan)
    frames, _ = machine.forward(plan.items, _Storage(costs.input_bytes))
    held = machine.live - machine.staging
    machine.backward(frames)
    if machine.live != machine.staging:
        raise AssertionError(f"{machine.live - machine.staging} bytes are left after the backward")
    return Simulation(machine.time_s, machine.peak, held, tuple(machine.runs))


@attrs.define(eq=False)
class _Storage:
    """Bytes that count as long as something holds them."""

    num_bytes: int
    holders: int = 0


@attrs.frozen(eq=False)
class _Frame:
    """What an item left for its backward."""

    item: Item
    source: _Storage
    held: list[_Storage]


class _Machine:
    """The memory and the clock."""

    def __init__(self, costs: ChainCosts, plan: ChainPlan) -> None:
        self._costs = costs
        self._choices = {choice.name: choice for choice in costs.choices}
        used = [self._choices[name] for name in plan.stores if name in self._choices]
        self.staging = sum(choice.staging_bytes for choice in used)
        self.live = self.staging
        self.peak = self.live
        self.time_s = 0.0
        self.runs = [0] * len(costs.layers)

    def forward(self, items: tuple[Item, ...], source: _Storage) -> tuple[list[_Frame], _Storage]:
        """Run items on an input; return what they leave for the backward, and the output."""
        frames = []
        for item in items:
            run = self._keep if isinstance(item, Kept) else self._pass
            frame, source = run(item, source)  # type: ignore[arg-type]
            frames.append(frame)
        return frames, source

    def backward(self, frames: list[_Frame]) -> None:
        """Run the backward of items, the last one first."""
        for frame in reversed(frames):
            if isinstance(frame.item, Kept):
                self._backward_kept(frame, self._costs.layers[frame.item.layer])
                continue
            source = frame.source
            if frame.item.store:
                source = _Storage(source.num_bytes)
            again, _ = self.forward(frame.item.items, source)
            self.backward(again)
            self._release(frame.held)

    def _keep(self, item: Kept, source: _Storage) -> tuple[_Frame, _Storage]:
        layer = self._costs.layers[item.layer]
        output = _Storage(layer.output_bytes)
        inner = layer.saved_bytes - (layer.output_bytes if layer.output_saved else 0)
        entering = [source] if layer.input_saved else []
        held = [*entering, _Storage(inner), *([output] if layer.output_saved else [])]
        choice = self._choice(item.store, layer)
        if isinstance(choice, Partial):
            held = [source, _Storage(choice.saved_bytes)]
            self.time_s += choice.extra_s
        self._hold(held)
        self._run(item.layer)
        if choice is not None and not isinstance(choice, Partial):
            size = source.num_bytes if layer.input_saved else 0
            able = layer.floating_bytes + size
            held = self._put_away(choice, held, size + layer.saved_bytes, able)
        return _Frame(item, source, held), output

    def _pass(self, item: Item, source: _Storage) -> tuple[_Frame, _Storage]:
        held = [source]
        self._hold(held)
        last = 0
        for last in layers_of((item,)):
            if not self._costs.layers[last].recomputable:
                raise PlanError(
                    f"layer {last} ({self._costs.layers[last].name}) cannot be recomputed, "
                    f"since it would not repeat its forward, but the plan does: {item!r}"
                )
            self._run(last)
        choice = self._choice(item.store, None)
        if choice is not None and not isinstance(choice, Partial):
            held = self._put_away(choice, held, source.num_bytes, source.num_bytes)
        return _Frame(item, source, held), _Storage(self._costs.layers[last].output_bytes)

    def _put_away(
        self, choice: Choice, held: list[_Storage], num_bytes: int, able_bytes: int
    ) -> list[_Storage]:
        """Hold what the choice leaves instead of what was held."""
        self.time_s += choice.seconds(choice.moves(num_bytes, able_bytes))
        rest = [_Storage(choice.stays(num_bytes, able_bytes))]
        self._hold(rest)
        self._release(held)
        return rest

    def _backward_kept(self, frame: _Frame, layer: LayerCost) -> None:
        store = self._choice(frame.item.store, layer)
        restored: list[_Storage] = []
        if isinstance(store, Partial):
            restored = [_Storage(layer.saved_bytes - store.saved_bytes)]
        elif store is not None:
            size = frame.source.num_bytes if layer.input_saved else 0
            restored = [_Storage(size + layer.saved_bytes)]
        self._hold(restored)
        self._touch(layer.backward_temporary_bytes)
        self.time_s += layer.backward_s
        self._release(restored + frame.held)

    def _choice(self, name: str, layer: LayerCost | None) -> Choice | Partial | None:
        if not name:
            return None
        offered: dict[str, Choice | Partial] = dict(self._choices)
        if layer is not None:
            offered |= {partial.name: partial for partial in layer.partials}
        if name not in offered:
            where = f"layer {layer.name}" if layer else "the input of a region"
            raise PlanError(f"the costs offer no {name!r} for {where}; they offer {list(offered)}")
        return offered[name]

    def _run(self, layer: int) -> None:
        self._touch(self._costs.layers[layer].forward_temporary_bytes)
        self.time_s += self._costs.layers[layer].forward_s
        self.runs[layer] += 1

    def _hold(self, storages: list[_Storage]) -> None:
        for storage in storages:
            self.live += 0 if storage.holders else storage.num_bytes
            storage.holders += 1
        self._touch(0)

    def _release(self, storages: list[_Storage]) -> None:
        for storage in storages:
            storage.holders -= 1
            self.live -= 0 if storage.holders else storage.num_bytes

    def _touch(self, temporary_bytes: int) -> None:
        self.peak = max(self.peak, self.live + temporary_bytes)
