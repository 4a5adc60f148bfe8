"""Overlapped pairs: a forward and the backward in the row below it, run as one block.

Both start when what either needs is there, and what either makes is there when both have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import BACKWARD_KINDS, Kind

if TYPE_CHECKING:
    from trainwright.pipeline_schedules.schedule import Schedule


def pair_rows(schedule: Schedule) -> NDArray[np.int64]:
    """Row numbers of every F_PAIRED with a backward below it on its rank, ascending."""
    kinds = schedule.packed[:, 0]
    forwards = np.flatnonzero(kinds == Kind.F_PAIRED)
    if not len(forwards):
        return forwards
    inside = ~np.isin(forwards + 1, schedule.offsets[1:])
    forwards = forwards[inside]
    return forwards[np.isin(kinds[forwards + 1], BACKWARD_KINDS)]


def unpaired(schedule: Schedule) -> Schedule:
    """The same schedule with every pair as a forward and then a backward, each for itself."""
    rows = schedule.packed.copy()
    rows[rows[:, 0] == Kind.F_PAIRED, 0] = Kind.F
    bounds = schedule.offsets
    return attrs.evolve(schedule, actions=np.split(rows, bounds[1:-1]))


def as_blocks(
    durations: NDArray[np.float64], forwards: NDArray[np.int64], lengths: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Durations with the whole length of a pair at its forward, and nothing at its backward.

    Args:
        durations: Of every row.
        forwards: What `pair_rows` gives.
        lengths: How long each pair takes.
    """
    if not len(forwards):
        return durations
    blocks = durations.copy()
    blocks[forwards] = lengths
    blocks[forwards + 1] = 0.0
    return blocks


def begin_together(starts: NDArray[np.float64], forwards: NDArray[np.int64]) -> None:
    """Let the backward of each pair start with its forward; as blocks, they end together."""
    starts[forwards + 1] = starts[forwards]


def share_blocks(
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    forwards: NDArray[np.int64],
    durations: NDArray[np.float64],
) -> None:
    """Cut the time of each pair into that of its forward and of its backward, in proportion."""
    alone = durations[forwards], durations[forwards + 1]
    both = alone[0] + alone[1]
    share = np.divide(alone[0], both, out=np.full(len(forwards), 0.5), where=both > 0)
    middle = starts[forwards] + share * (ends[forwards] - starts[forwards])
    ends[forwards] = middle
    starts[forwards + 1] = middle
