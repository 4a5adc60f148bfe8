"""Reads a plan out of the tables: at each place the move that they found best."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .chain_least import LeastMemory
from .chain_moves import Fan, Keep, Moves
from .chain_tables import InnerTable, OuterTable
from .plan import Item, Kept, Region


class Score(Protocol):
    """What a move costs at its place; lower is better, inf is out of the question.

    ``end`` is where a recomputed region ends, None at the outermost level.
    """

    def keep(self, move: Keep, first: int, end: int | None, memory: int) -> float:
        """Return the cost of keeping the layer ``first``."""
        ...

    def fan(self, fan: Fan, first: int, end: int | None, memory: int) -> NDArray[Any]:
        """Return the cost for each size of the region."""
        ...


class ByTime:
    """Reaches the least time of the tables."""

    def __init__(self, inner: InnerTable, outer: OuterTable) -> None:
        self._inner = inner
        self._outer = outer

    def keep(self, move: Keep, first: int, end: int | None, memory: int) -> float:
        """Return the least time that begins with this move."""
        if end is None:
            return self._outer.keep_s(move, first, memory)
        return self._inner.keep_s(move, first, end, memory)

    def fan(self, fan: Fan, first: int, end: int | None, memory: int) -> NDArray[Any]:
        """Return the least time for each size of the region."""
        if end is None:
            return self._outer.fan_s(fan, first, memory)
        return self._inner.fan_s(fan, first, end, memory)


class ByMemory:
    """Keeps layers while the rest still fits, and else saves memory."""

    def __init__(self, least: LeastMemory) -> None:
        self._least = least

    def keep(self, move: Keep, first: int, end: int | None, memory: int) -> float:
        """Return -1 for keeping a layer as it is where the rest fits, else the peak."""
        if end is None:
            peak = self._least.outer_keep(move, first)
        else:
            peak = self._least.inner_keep(move, first, end)
        if peak > memory:
            return float("inf")
        return peak if move.store else -1.0

    def fan(self, fan: Fan, first: int, end: int | None, memory: int) -> NDArray[Any]:
        """Return the peak for each size of the region."""
        if end is None:
            peaks = self._least.outer_fan(fan, first)
        else:
            peaks = self._least.inner_fan(fan, first, end)
        return np.where(peaks > memory, np.inf, peaks)


def read_plan(moves: Moves, score: Score, memory: int) -> tuple[Item, ...]:
    """Return the items of the plan that takes the move of the lowest score at each place.

    Args:
        moves: Of the chain.
        score: Must be finite for some move at each place that is reached.
        memory: For the whole chain.
    """
    return _read(moves, score, 0, 0, None, memory)


def _read(
    moves: Moves, score: Score, held: int, first: int, end: int | None, memory: int
) -> tuple[Item, ...]:
    items: list[Item] = []
    stop = moves.num_layers if end is None else end
    while first < stop:
        keep, keep_score = _best_keep(moves, score, held, first, end, memory)
        fan, size, fan_score = _best_fan(moves, score, held, first, end, memory)
        # Of equals the one that recomputes nothing.
        if fan is not None and fan_score < keep_score:
            left = memory - fan.left_hold
            inside = _read(moves, score, fan.left_held, first, first + size, left)
            items.append(Region(inside, fan.store))
            memory, held, first = memory - fan.hold, 0, first + size
        else:
            items.append(Kept(first, keep.store))
            memory, held, first = memory - keep.hold, keep.next_held, first + 1
    return tuple(items)


def _best_keep(
    moves: Moves, score: Score, held: int, first: int, end: int | None, memory: int
) -> tuple[Keep, float]:
    keeps = [moves.keep(held, first)] if end is not None else [*moves.outer_keeps(held, first)]
    scores = [score.keep(keep, first, end, memory) for keep in keeps]
    best = min(range(len(keeps)), key=scores.__getitem__)
    return keeps[best], scores[best]


def _best_fan(
    moves: Moves, score: Score, held: int, first: int, end: int | None, memory: int
) -> tuple[Fan | None, int, float]:
    fans = [moves.fan(held, first, end)] if end is not None else [*moves.outer_fans(held, first)]
    found: tuple[Fan | None, int, float] = None, 0, float("inf")
    for fan in fans:
        scores = score.fan(fan, first, end, memory)
        if scores.size and float(scores.min()) < found[2]:
            found = fan, int(scores.argmin()) + 1, float(scores.min())
    return found
