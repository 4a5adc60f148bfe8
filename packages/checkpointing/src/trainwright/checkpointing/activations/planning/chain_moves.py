"""What can be done next with a chain: the moves that the tables of the chain planner weigh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .choices import Choice, Partial
from .costs import ChainCosts

# A state is (held, first): the layers from `first` on are to be run; `held` is 1 if the layer
# before keeps their input as its own output in any case, or a region that is being recomputed
# does, so that it costs nothing to keep it.


class Measure(Protocol):
    """Turns bytes, one number or an array, into the units of memory that tables count in."""

    def __call__(self, num_bytes: Any) -> Any:
        """Return the units of so many bytes."""
        ...


class Keep(NamedTuple):
    """Keep one layer, in some way.

    ``need`` is the memory without which it cannot be done, ``hold`` what it takes from the rest,
    ``next_held`` is part of the state after it, ``time_s`` does not count the rest.
    """

    store: str
    need: int
    hold: int
    next_held: int
    time_s: float


class Fan(NamedTuple):
    """Make a region of the next 1, 2, 3, ... layers, at least one of which is left for the rest.

    ``needs`` and ``times_s`` are those of the first run of a region of each size. The region's
    input takes ``hold`` from the rest; its recomputation starts with ``left_hold`` less memory, in
    the state ``left_held``.
    """

    store: str
    needs: NDArray[np.int64]
    hold: int
    left_hold: int
    left_held: int
    times_s: NDArray[np.float64]


class Moves:
    """The moves of a chain, in bytes or in rounded units.

    Args:
        costs: Of the chain.
        measure: Turns bytes into the memory of the moves.
        stores: Names of the choices and partials that may be used at the outermost level.
    """

    def __init__(self, costs: ChainCosts, measure: Measure, stores: frozenset[str]) -> None:
        layers = costs.layers
        self.num_layers = len(layers)
        self._costs = costs
        self._measure = measure
        self._stores = stores
        self._choices = [choice for choice in costs.choices if choice.name in stores]
        self._forward_s = np.array([layer.forward_s for layer in layers], dtype=np.float64)
        temporaries = [layer.forward_temporary_bytes for layer in layers]
        self._temporaries = np.array(temporaries, dtype=np.int64)
        # From each layer on, how many layers in a row can be recomputed.
        self._reach = [0] * (len(layers) + 1)
        for number in range(len(layers) - 1, -1, -1):
            again = layers[number].recomputable
            self._reach[number] = self._reach[number + 1] + 1 if again else 0

    def states(self, first: int) -> tuple[int, ...]:
        """Return the values of ``held`` that can occur at a layer, in the order to fill tables."""
        layers = self._costs.layers
        if (first and layers[first - 1].output_saved) or not layers[first].input_saved:
            return (1, 0)
        return (0,)

    def keep(self, held: int, layer: int) -> Keep:
        """Return the move that keeps a layer as it is."""
        cost = self._costs.layers[layer]
        hold = self._kept_source(held, layer) + cost.saved_bytes
        most = max(cost.forward_temporary_bytes, cost.backward_temporary_bytes)
        time_s = float(cost.forward_s + cost.backward_s)
        need = self._measure(hold + most)
        return Keep("", need, self._measure(hold), int(cost.output_saved), time_s)

    def fan(self, held: int, first: int, end: int) -> Fan:
        """Return the regions of layers before ``end`` whose input stays as it is."""
        source = self._source(held, first)
        hold = self._measure(source)
        left_hold, left_held = 0, held
        if not self._costs.layers[first].input_saved:
            left_hold, left_held = hold, 1  # else a layer within would let go of it
        needs, times_s = self._needs(source, first, end), self._times(first, end)
        return Fan("", needs, hold, left_hold, left_held, times_s)

    def outer_keeps(self, held: int, layer: int) -> Iterator[Keep]:
        """Yield the ways to keep a layer at the outermost level; the plain one comes first."""
        yield self.keep(held, layer)
        for partial in self._costs.layers[layer].partials:
            if partial.name in self._stores:
                yield self._keep_partly(held, layer, partial)
        if layer + 1 < self.num_layers:
            for choice in self._choices:
                yield self._put_away(held, layer, choice)

    def outer_fans(self, held: int, first: int) -> Iterator[Fan]:
        """Yield the regions at the outermost level, one fan for each way to store the input."""
        yield self.fan(held, first, self.num_layers)
        for choice in self._choices:
            yield self._fan_put_away(held, first, choice)

    def _keep_partly(self, held: int, layer: int, partial: Partial) -> Keep:
        cost = self._costs.layers[layer]
        hold = self._source(held, layer) + partial.saved_bytes
        restored = self._source(held, layer) + cost.saved_bytes
        need = max(hold + cost.forward_temporary_bytes, restored + cost.backward_temporary_bytes)
        time_s = float(cost.forward_s + cost.backward_s + partial.extra_s)
        return Keep(partial.name, self._measure(need), self._measure(hold), 0, time_s)

    def _put_away(self, held: int, layer: int, choice: Choice) -> Keep:
        cost = self._costs.layers[layer]
        source = self._costs.kept_input_bytes_of(layer)
        everything, able = source + cost.saved_bytes, source + cost.floating_bytes
        stays = choice.stays(everything, able)
        saved = self._kept_source(held, layer) + cost.saved_bytes
        need = max(
            saved + max(stays, cost.forward_temporary_bytes),
            # What is restored is a copy, also of an input that others still hold.
            everything + stays + cost.backward_temporary_bytes,
        )
        extra_s = choice.seconds(choice.moves(everything, able))
        time_s = float(cost.forward_s + cost.backward_s + extra_s)
        return Keep(choice.name, self._measure(need), self._measure(stays), 0, time_s)

    def _fan_put_away(self, held: int, first: int, choice: Choice) -> Fan:
        end = self.num_layers
        source = self._costs.input_bytes_of(first)
        stays = choice.stays(source, source)
        needs = self._needs(self._source(held, first), first, end)
        least = self._measure(self._source(held, first) + stays)
        times_s = self._times(first, end) + choice.seconds(choice.moves(source, source))
        hold = self._measure(stays)
        return Fan(choice.name, np.maximum(needs, least), hold, hold, 0, times_s)

    def _size(self, first: int, end: int) -> int:
        """Return the most layers of a region, one being left for the rest."""
        return min(self._reach[first], end - 1 - first)

    def _needs(self, source: int, first: int, end: int) -> NDArray[np.int64]:
        most = self._temporaries[first : first + self._size(first, end)]
        needs: NDArray[np.int64] = self._measure(source + np.maximum.accumulate(most))
        return needs

    def _times(self, first: int, end: int) -> NDArray[np.float64]:
        return np.cumsum(self._forward_s[first : first + self._size(first, end)])

    def _kept_source(self, held: int, layer: int) -> int:
        return 0 if held else self._costs.kept_input_bytes_of(layer)

    def _source(self, held: int, layer: int) -> int:
        return 0 if held else self._costs.input_bytes_of(layer)
