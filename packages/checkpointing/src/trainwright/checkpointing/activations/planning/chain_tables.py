"""The tables of the chain planner: the least time of every part of a chain at every memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from .chain_moves import Fan, Keep, Moves

Table = NDArray[np.float64]


class InnerTable:
    """Least time of the layers first..last in a recomputed region, for every first, last, memory.

    Source: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for
    heterogeneous chains", the persistent schedules; here the memory of an input belongs to the
    layers that read it, and is free where the layer before keeps it as its output.
    """

    def __init__(self, moves: Moves, top: int) -> None:
        self._top = top
        # Row last - first, column memory.
        self._tables: dict[tuple[int, int], Table] = {}
        self._scratch = np.empty((moves.num_layers, top + 1))
        for first in range(moves.num_layers - 1, -1, -1):
            for held in moves.states(first):
                self._tables[held, first] = self._fill(moves, held, first)

    def rows(self, held: int, first: int, count: int) -> Table:
        """Return the least time of the next 1, 2, ..., ``count`` layers for every memory."""
        return self._tables[held, first][:count]

    def keep_s(self, keep: Keep, first: int, end: int, memory: int) -> float:
        """Return the least time of the layers before ``end`` that begins with this move."""
        if memory < keep.need:
            return math.inf
        if first + 1 == end:
            return keep.time_s
        rest = self._tables[keep.next_held, first + 1]
        return keep.time_s + float(rest[end - 2 - first, memory - keep.hold])

    def fan_s(self, fan: Fan, first: int, end: int, memory: int) -> Table:
        """Return the least time of the layers before ``end`` for each size of the region."""
        count = len(fan.times_s)
        if not count or memory < max(fan.hold, fan.left_hold):
            return np.full(count, math.inf)
        left = self._tables[fan.left_held, first][:count, memory - fan.left_hold]
        rest = np.array(
            [
                self._tables[0, start][end - 1 - start, memory - fan.hold]
                for start in range(first + 1, first + 1 + count)
            ]
        )
        return np.where(fan.needs <= memory, fan.times_s + left + rest, math.inf)

    def _fill(self, moves: Moves, held: int, first: int) -> Table:
        top, count = self._top, moves.num_layers - first
        best = np.full((count, top + 1), math.inf)
        keep = moves.keep(held, first)
        best[0, keep.need :] = keep.time_s
        if count > 1 and keep.need <= top:
            rest = self._tables[keep.next_held, first + 1]
            best[1:, keep.need :] = rest[:, keep.need - keep.hold : top + 1 - keep.hold]
            best[1:, keep.need :] += keep.time_s
        fan = moves.fan(held, first, moves.num_layers)
        # In the order of the sizes, since a region's own recomputation is a row filled before.
        lefts = best if fan.left_held == held else self._tables[fan.left_held, first]
        for size, (need, time_s) in enumerate(zip(fan.needs, fan.times_s, strict=True), 1):
            low = max(fan.hold, int(need))
            if low > top:
                break
            rest = self._tables[0, first + size][:, low - fan.hold : top + 1 - fan.hold]
            left = lefts[size - 1, low - fan.left_hold : top + 1 - fan.left_hold]
            candidate = self._scratch[: count - size, low:]
            np.add(rest, left + time_s, out=candidate)
            target = best[size:, low:]
            np.minimum(target, candidate, out=target)
        return best


class OuterTable:
    """Least time of the layers from first on at the outermost level, where choices are offered."""

    def __init__(self, moves: Moves, inner: InnerTable, top: int) -> None:
        self._inner = inner
        self._num_layers = moves.num_layers
        # By held: row first, column memory; the last row, of no layer, is zero.
        self._tables = np.full((2, moves.num_layers + 1, top + 1), math.inf)
        self._tables[:, -1] = 0.0
        for first in range(moves.num_layers - 1, -1, -1):
            for held in moves.states(first):
                best = self._tables[held, first]
                for keep in moves.outer_keeps(held, first):
                    self._weigh_keep(best, keep, first)
                for fan in moves.outer_fans(held, first):
                    self._weigh_fan(best, fan, first)

    def time_s(self, memory: int) -> float:
        """Return the least time of the chain; inf if it does not fit."""
        return float(self._tables[0, 0, memory])

    def keep_s(self, keep: Keep, first: int, memory: int) -> float:
        """Return the least time of the layers from ``first`` on that begins with this move."""
        if memory < keep.need:
            return math.inf
        rest = self._tables[keep.next_held, first + 1, memory - keep.hold]
        return keep.time_s + float(rest)

    def fan_s(self, fan: Fan, first: int, memory: int) -> Table:
        """Return the least time of the layers from ``first`` on for each size of the region."""
        count = len(fan.times_s)
        if memory < max(fan.hold, fan.left_hold):
            return np.full(count, math.inf)
        left = self._inner.rows(fan.left_held, first, count)[:, memory - fan.left_hold]
        rest = self._tables[0, first + 1 : first + 1 + count, memory - fan.hold]
        return np.where(fan.needs <= memory, fan.times_s + left + rest, math.inf)

    def _weigh_keep(self, best: Table, keep: Keep, first: int) -> None:
        size = len(best)
        if keep.need < size:
            low = keep.need - keep.hold
            rest = self._tables[keep.next_held, first + 1, low : size - keep.hold]
            np.minimum(best[keep.need :], rest + keep.time_s, out=best[keep.need :])

    def _weigh_fan(self, best: Table, fan: Fan, first: int) -> None:
        count, size = len(fan.times_s), len(best)
        low = max(fan.hold, fan.left_hold)
        if not count or low >= size:
            return
        left = self._inner.rows(fan.left_held, first, count)
        rest = self._tables[0, first + 1 : first + 1 + count]
        times_s = left[:, low - fan.left_hold : size - fan.left_hold] + fan.times_s[:, None]
        times_s += rest[:, low - fan.hold : size - fan.hold]
        times_s[np.arange(low, size) < fan.needs[:, None]] = math.inf
        np.minimum(best[low:], times_s.min(axis=0), out=best[low:])
