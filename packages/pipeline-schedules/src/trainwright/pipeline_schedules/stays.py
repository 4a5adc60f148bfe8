"""From when to when the weights of each stage stay gathered under a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import WEIGHT_KINDS
from trainwright.pipeline_schedules.dependencies import rows_of_kinds
from trainwright.pipeline_schedules.pairs import pair_rows
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


@attrs.define(eq=False)
class _Run:
    """Consecutive reads of the same stages: of one, or of the two that a pair reads at once."""

    stages: tuple[int, ...]
    first: int
    last: int


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
    first, last = _blocks(schedule)
    bounds = np.searchsorted(reads, schedule.offsets)
    stays: list[Stay] = []
    for rank, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        chunks = np.count_nonzero(gathered[list(schedule.stages_of(rank))])
        numbers = reads[start:stop]
        table = np.stack([rows[numbers, 1], first[numbers], last[numbers]], axis=1)
        if plan.keep is None or plan.keep >= chunks:
            stays += _once(table)
        elif plan.keep == 0:
            # A pair that reads one stage twice needs it once.
            once = dict.fromkeys((stage, begin, end) for stage, begin, end in table.tolist())
            stays += (Stay(stage, begin, end, ahead=False) for stage, begin, end in once)
        else:
            stays += _within(list(_runs(table)), plan.keep)
    return stays


def _blocks(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last row of what each row runs in: itself, or a pair."""
    first = np.arange(schedule.num_actions)
    last = first.copy()
    forwards = pair_rows(schedule)
    first[forwards + 1] = forwards
    last[forwards] = forwards + 1
    return first, last


def _once(table: NDArray[np.int64]) -> list[Stay]:
    """Each stage from its first to its last read; the table holds stage, first and last row."""
    stages = table[:, 0]
    names, first = np.unique(stages, return_index=True)
    _, from_behind = np.unique(stages[::-1], return_index=True)
    last = len(stages) - 1 - from_behind
    columns = zip(names.tolist(), table[first, 1].tolist(), table[last, 2].tolist(), strict=True)
    stays = [Stay(*column, ahead=True) for column in columns]
    return sorted(stays, key=lambda stay: stay.first)


def _runs(table: NDArray[np.int64]) -> Iterator[_Run]:
    """Consecutive reads of the same stages, which need no gather between them."""
    blocks = [
        _Run(tuple(dict.fromkeys(stage for stage, _, _ in reads)), *bounds)
        for bounds, reads in itertools.groupby(table.tolist(), key=lambda read: tuple(read[1:]))
    ]
    for stages, run in itertools.groupby(blocks, key=lambda block: block.stages):
        members = list(run)
        yield _Run(stages, members[0].first, members[-1].last)


def _within(runs: Sequence[_Run], most: int) -> list[Stay]:
    """The fewest stays of which at most ``most``, or as many as one run reads, exist at once.

    What is needed farthest in the future makes room (Belady). Where there is room for the stages
    of the next run too, they are gathered ahead, while the present one runs.
    """
    following_run = _next_run_of_same_stage(runs)
    stays: list[Stay] = []
    live: dict[int, Stay] = {}
    following: dict[int, int] = {}  # for each live stage, the run that reads it next
    for number, run in enumerate(runs):
        needed = dict.fromkeys(run.stages, number)
        for stage in runs[number + 1].stages if number + 1 < len(runs) else ():
            if len(needed) < most:
                needed.setdefault(stage, number + 1)
        absent = [stage for stage in needed if stage not in live]
        while len(live) + len(absent) > max(most, len(run.stages)):
            dropped = max(live.keys() - needed.keys(), key=following.__getitem__)
            del live[dropped], following[dropped]
        for stage in absent:
            read_by = runs[needed[stage]]
            ahead = needed[stage] > number or number == 0
            live[stage] = Stay(stage, read_by.first, read_by.last, ahead)
            stays.append(live[stage])
            following[stage] = needed[stage]
        for stage in run.stages:
            live[stage].last = run.last
            following[stage] = following_run[number][stage]
    return stays


def _next_run_of_same_stage(runs: Sequence[_Run]) -> list[dict[int, int]]:
    latest: dict[int, int] = {}
    following: list[dict[int, int]] = []
    for number in reversed(range(len(runs))):
        stages = runs[number].stages
        following.append({stage: latest.get(stage, len(runs)) for stage in stages})
        latest.update(dict.fromkeys(stages, number))
    return following[::-1]
