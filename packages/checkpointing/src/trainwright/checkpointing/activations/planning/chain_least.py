"""The least memory with which a chain can be run at all, in exact bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .chain_moves import Fan, Keep, Moves

Bytes = NDArray[np.int64]


class LeastMemory:
    """Least peak of every part of a chain: of plans whose only aim is memory.

    Args:
        moves: Measured in bytes.
    """

    def __init__(self, moves: Moves) -> None:
        # By state: the least peak of the layers first..last in a region, by last - first.
        self._inner: dict[tuple[int, int], Bytes] = {}
        # By held and first: that of the rest of the chain at the outermost level.
        self._outer = np.zeros((2, moves.num_layers + 1), dtype=np.int64)
        for first in range(moves.num_layers - 1, -1, -1):
            for held in moves.states(first):
                self._inner[held, first] = self._fill(moves, held, first)
        for first in range(moves.num_layers - 1, -1, -1):
            for held in moves.states(first):
                keeps = [self.outer_keep(keep, first) for keep in moves.outer_keeps(held, first)]
                fans = [self.outer_fan(fan, first) for fan in moves.outer_fans(held, first)]
                self._outer[held, first] = min(keeps + [int(f.min()) for f in fans if f.size])

    @property
    def bytes(self) -> int:
        """Least peak of the whole chain."""
        return int(self._outer[0, 0])

    def outer_keep(self, keep: Keep, first: int) -> int:
        """Return the least peak of the layers from ``first`` on that begins with this move."""
        return max(keep.need, keep.hold + int(self._outer[keep.next_held, first + 1]))

    def outer_fan(self, fan: Fan, first: int) -> Bytes:
        """Return the least peak of the layers from ``first`` on for each size of the region."""
        count = len(fan.needs)
        rest = fan.hold + self._outer[0, first + 1 : first + 1 + count]
        left = fan.left_hold + self._inner[fan.left_held, first][:count]
        return np.maximum(fan.needs, np.maximum(rest, left))

    def inner_keep(self, keep: Keep, first: int, end: int) -> int:
        """Return the least peak of the layers before ``end`` that begins with this move."""
        if first + 1 == end:
            return keep.need
        rest = self._inner[keep.next_held, first + 1][end - 2 - first]
        return max(keep.need, keep.hold + int(rest))

    def inner_fan(self, fan: Fan, first: int, end: int) -> Bytes:
        """Return the least peak of the layers before ``end`` for each size of the region."""
        count = len(fan.needs)
        starts = range(first + 1, first + 1 + count)
        rests = [self._inner[0, start][end - 1 - start] for start in starts]
        rest = fan.hold + np.array(rests, dtype=np.int64)
        left = fan.left_hold + self._inner[fan.left_held, first][:count]
        return np.maximum(fan.needs, np.maximum(rest, left))

    def _fill(self, moves: Moves, held: int, first: int) -> Bytes:
        count = moves.num_layers - first
        keep = moves.keep(held, first)
        best: Bytes = np.full(count, keep.need, dtype=np.int64)
        if count > 1:
            rest = self._inner[keep.next_held, first + 1]
            best[1:] = np.maximum(keep.need, keep.hold + rest)
        fan = moves.fan(held, first, moves.num_layers)
        lefts = best if fan.left_held == held else self._inner[fan.left_held, first]
        for size, need in enumerate(fan.needs, 1):
            least = max(int(need), fan.left_hold + int(lefts[size - 1]))
            peaks = np.maximum(least, fan.hold + self._inner[0, first + size])
            best[size:] = np.minimum(best[size:], peaks)
        return best
