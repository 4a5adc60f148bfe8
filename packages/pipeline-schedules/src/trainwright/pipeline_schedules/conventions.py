"""How others count, where that differs from what a schedule does."""

from __future__ import annotations

import attrs
import numpy as np

from trainwright.pipeline_schedules.actions import BACKWARD_KINDS, FORWARD_KINDS
from trainwright.pipeline_schedules.dependencies import Waits, rows_of_kinds
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule


def wait_once_a_loop(schedule: Schedule, neighbours: Waits) -> Waits:
    """Where a loop closes, let only the first of each ``ranks`` microbatches wait for the rank.

    Args:
        schedule: Computing actions.
        neighbours: What they wait for from neighbouring stages.

    Raises:
        ScheduleError: Ranks do not divide microbatches.
    """
    if schedule.num_microbatches % schedule.num_ranks:
        raise ScheduleError(
            "loops_wait_once takes microbatches in groups of as many as there are ranks; "
            f"{schedule.num_ranks} ranks do not divide {schedule.num_microbatches} microbatches"
        )
    rows = schedule.packed
    owner = np.asarray(schedule.rank_of_stage)
    closes = (owner[:-1] == schedule.num_ranks - 1) & (owner[1:] == 0) & (schedule.num_ranks > 1)
    before = np.concatenate([[False], closes])[rows[:, 1]] & rows_of_kinds(rows, FORWARD_KINDS)
    behind = np.concatenate([closes, [False]])[rows[:, 1]] & rows_of_kinds(rows, BACKWARD_KINDS)
    later = rows[:, 2] % schedule.num_ranks > 0
    needs = np.where((before | behind) & later, schedule.num_actions, neighbours.needs)
    return attrs.evolve(neighbours, needs=needs.astype(np.int32))
