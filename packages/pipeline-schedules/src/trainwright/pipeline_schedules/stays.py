"""From when to when the weights of each stage stay gathered under a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import WEIGHT_KINDS
from trainwright.pipeline_schedules.dependencies import rows_of_kinds
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.weight_plan import WeightPlan


@attrs.define(eq=False)
class Stay:
    """One stretch in which a stage is gathered: rows of its first and last action in it.

    ``ahead`` says that there is room to gather it while the action before the first one runs.
    """

    stage: int
    first: int
    last: int
    ahead: bool


def stays_under(schedule: Schedule, plan: WeightPlan) -> list[Stay]:
    """When each stage is gathered, rank after rank, in the order of the gathers.

    Args:
        schedule: Computing actions, verified.
        plan: What to keep.
    """
    gathered = np.zeros(schedule.num_stages, dtype=np.bool_)
    gathered[list(plan.stages_in(schedule))] = True
    rows = schedule.packed
    reads = np.flatnonzero(rows_of_kinds(rows, WEIGHT_KINDS) & gathered[rows[:, 1]])
    bounds = np.searchsorted(reads, schedule.offsets)
    stays: list[Stay] = []
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        chunks = np.count_nonzero(gathered[list(schedule.stages_of(rank))])
        numbers, stages = reads[start:stop], rows[reads[start:stop], 1]
        if plan.keep is None or plan.keep >= chunks:
            stays += _once(numbers, stages)
        elif plan.keep == 0:
            pairs = zip(stages.tolist(), numbers.tolist(), strict=True)
            stays += (Stay(stage, row, row, ahead=False) for stage, row in pairs)
        else:
            stays += _within(list(_runs(numbers, stages)), plan.keep)
    return stays


def _once(numbers: NDArray[np.int64], stages: NDArray[np.int32]) -> list[Stay]:
    """Each stage from its first to its last read."""
    names, first = np.unique(stages, return_index=True)
    _, from_behind = np.unique(stages[::-1], return_index=True)
    last = len(stages) - 1 - from_behind
    columns = zip(names.tolist(), numbers[first].tolist(), numbers[last].tolist(), strict=True)
    stays = [Stay(*column, ahead=True) for column in columns]
    return sorted(stays, key=lambda stay: stay.first)


def _runs(numbers: NDArray[np.int64], stages: NDArray[np.int32]) -> Iterator[Stay]:
    """Consecutive reads of one stage, which need no gather between them."""
    pairs = zip(stages.tolist(), numbers.tolist(), strict=True)
    for stage, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
        rows = [row for _, row in run]
        yield Stay(stage, rows[0], rows[-1], ahead=False)


def _within(runs: Sequence[Stay], most: int) -> list[Stay]:
    """The fewest stays of which at most ``most`` exist at once.

    What is needed farthest in the future makes room (Belady). From two on, the next run's stage is
    needed already while the present one runs, so that there is always room to gather it ahead.
    """
    next_run = _next_run_of_same_stage(runs)
    stays: list[Stay] = []
    live: dict[int, Stay] = {}
    following: dict[int, int] = {}  # for each live stage, the run that reads it next
    for number, run in enumerate(runs):
        needed = {run.stage: number}
        if most >= 2 and number + 1 < len(runs):
            needed[runs[number + 1].stage] = number + 1
        absent = [stage for stage in needed if stage not in live]
        while len(live) + len(absent) > most:
            dropped = max(live.keys() - needed.keys(), key=following.__getitem__)
            del live[dropped], following[dropped]
        for stage in absent:
            read_by = runs[needed[stage]]
            live[stage] = Stay(stage, read_by.first, read_by.last, ahead=most >= 2)
            stays.append(live[stage])
            following[stage] = needed[stage]
        live[run.stage].last = run.last
        following[run.stage] = next_run[number]
    return stays


def _next_run_of_same_stage(runs: Sequence[Stay]) -> list[int]:
    latest: dict[int, int] = {}
    following = [len(runs)] * len(runs)
    for number in reversed(range(len(runs))):
        following[number] = latest.get(runs[number].stage, len(runs))
        latest[runs[number].stage] = number
    return following
