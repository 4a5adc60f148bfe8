"""How often weights are gathered and gradients reduced, and how much is gathered at once."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule


@attrs.frozen
class WeightTraffic:
    """What a stage moves between its data-parallel ranks in a step.

    Args:
        gathers: How often its weights are gathered, g.
        reductions: How often its gradients are reduced, r.
    """

    gathers: int
    reductions: int

    def elements(self, parameters: int, data_ranks: int) -> float:
        """Elements that each of ``data_ranks`` ranks sends over a ring: (gΦ + rΦ)(N-1)/N."""
        return (self.gathers + self.reductions) * parameters * (data_ranks - 1) / data_ranks


def weight_traffic(schedule: Schedule) -> tuple[WeightTraffic, ...]:
    """For each stage of a lowered schedule how often it is gathered and how often reduced.

    Raises:
        ScheduleError: The schedule is not lowered.
    """
    if not schedule.lowered:
        raise ScheduleError("only a lowered schedule gathers and reduces; lower it first")
    counts = zip(*(part.tolist() for part in weight_counts(schedule)), strict=True)
    return tuple(WeightTraffic(*of_stage) for of_stage in counts)


def weight_counts(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Gathers and reductions of each stage: two of ``[stages]``."""
    rows = schedule.packed
    gathers = np.bincount(rows[rows[:, 0] == Kind.GATHER, 1], minlength=schedule.num_stages)
    reductions = np.bincount(rows[rows[:, 0] == Kind.REDUCE, 1], minlength=schedule.num_stages)
    return gathers, reductions


def peak_live(schedule: Schedule) -> NDArray[np.int64]:
    """The most stages that each rank has gathered at once: ``[ranks]``."""
    change_of_kind = np.zeros(max(Kind) + 1, dtype=np.int64)
    change_of_kind[Kind.GATHER], change_of_kind[Kind.RELEASE] = 1, -1
    peaks = [np.cumsum(change_of_kind[rows[:, 0]]).max(initial=0) for rows in schedule.actions]
    return np.array(peaks, dtype=np.int64)
