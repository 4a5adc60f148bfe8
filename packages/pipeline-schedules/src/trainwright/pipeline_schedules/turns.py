"""What generators are made of: actions that take turns, one microbatch further in every cycle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Rows

Turn = tuple[Kind, int, int]
"""Kind, stage, and microbatch in the first cycle."""

_LARGEST = 2**31 - 1


def in_turn(cycles: int, turns: Sequence[Turn]) -> Rows:
    """Rows of so many cycles, in each of which every turn comes once, a microbatch further on.

    Microbatches outside the step come out too (negative, or too large); `joined` drops them, so
    that a steady phase can be written down without its edges.
    """
    rows = np.empty((max(cycles, 0), len(turns), 3), dtype=np.int32)
    rows[:] = turns
    rows[:, :, 2] += np.arange(len(rows), dtype=np.int32)[:, None]
    return rows.reshape(-1, 3)


def joined(phases: Sequence[Rows], microbatches: int) -> Rows:
    """The phases one after the other, without the microbatches that the step does not have."""
    rows = np.concatenate(phases)
    return rows[(rows[:, 2] >= 0) & (rows[:, 2] < microbatches)]


def require_positive(**sizes: int) -> None:
    """Every size is at least 1, and their product, the number of forwards, fits an int32.

    Raises:
        ScheduleError: One is not, or is no whole number, or they are too many.
    """
    for name, size in sizes.items():
        if not isinstance(size, SupportsIndex):
            raise ScheduleError(f"{name} must be a whole number, got {size!r}")
        if size < 1:
            raise ScheduleError(f"{name} must be at least 1, got {size}")
    number = math.prod(sizes.values())
    if number > _LARGEST:
        raise ScheduleError(
            f"{' times '.join(sizes)} must be at most {_LARGEST}, since actions are numbered in "
            f"int32, got {number}"
        )
