"""Whether every action that must be there is there, once, on the rank that owns its stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import (
    BACKWARD_KINDS,
    FORWARD_KINDS,
    NO_MICROBATCH,
    STAGE_KINDS,
    Action,
    Kind,
)
from trainwright.pipeline_schedules.dependencies import rows_of_kinds
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.pairs import pair_rows
from trainwright.pipeline_schedules.schedule import Schedule


def check_known(schedule: Schedule) -> None:
    """Every action names a stage of its rank and a microbatch that exist."""
    rows = schedule.packed
    ranks = np.repeat(np.arange(schedule.num_ranks), np.diff(schedule.offsets))
    unknown = (rows[:, 1] < 0) | (rows[:, 1] >= schedule.num_stages)
    _refuse(schedule, unknown, f"names no stage between 0 and {schedule.num_stages - 1}")
    whole_stage = rows_of_kinds(rows, STAGE_KINDS)
    absent = (rows[:, 2] < 0) | (rows[:, 2] >= schedule.num_microbatches)
    last = schedule.num_microbatches - 1
    _refuse(schedule, absent & ~whole_stage, f"names no microbatch between 0 and {last}")
    numbered = whole_stage & (rows[:, 2] != NO_MICROBATCH)
    _refuse(schedule, numbered, f"concerns a whole stage: its microbatch must be {NO_MICROBATCH}")
    owner = np.asarray(schedule.rank_of_stage)[rows[:, 1]]
    _refuse(schedule, owner != ranks, "is not on the rank that owns its stage")


def check_complete(schedule: Schedule) -> None:
    """Each stage has, for each microbatch, one F and one B (or one I and one W), and no more.

    Lowered schedules have in addition one send and one receive for every boundary between ranks,
    and one reduction a stage, or one for each microbatch; gathers and releases, as they like.
    """
    trained = 0 if schedule.forward_only else 1
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    every = np.ones((stages, 1), dtype=np.int64)
    _check_counts(schedule, FORWARD_KINDS, every)
    _check_counts(schedule, BACKWARD_KINDS, every * trained)
    input_gradients = _counts(schedule, (Kind.I,))
    _check_counts(schedule, (Kind.W,), input_gradients.reshape(stages, microbatches))
    ranks = np.asarray(schedule.rank_of_stage)
    crossing = np.zeros((stages + 1, 1), dtype=np.int64)
    crossing[1:-1, 0] = (ranks[1:] != ranks[:-1]) & schedule.lowered
    before, behind = crossing[:-1], crossing[1:]
    _check_counts(schedule, (Kind.SEND_F,), behind)
    _check_counts(schedule, (Kind.RECV_F,), before)
    _check_counts(schedule, (Kind.SEND_B,), before * trained)
    _check_counts(schedule, (Kind.RECV_B,), behind * trained)
    _check_reductions(schedule, trained if schedule.lowered else 0)
    if not schedule.lowered:
        stays = rows_of_kinds(schedule.packed, (Kind.GATHER, Kind.RELEASE))
        _refuse(schedule, stays, "has no business there: the schedule is not marked as lowered")


def check_pairs(schedule: Schedule) -> None:
    """Below each F_PAIRED stands the backward that it overlaps with, of something else."""
    rows = schedule.packed
    alone = rows[:, 0] == Kind.F_PAIRED
    forwards = pair_rows(schedule)
    alone[forwards] = False
    _refuse(schedule, alone, "overlaps with nothing: a B or an I must stand in the row below it")
    itself = np.zeros(len(rows), dtype=np.bool_)
    itself[forwards] = (rows[forwards, 1:] == rows[forwards + 1, 1:]).all(axis=1)
    _refuse(schedule, itself, "overlaps with its own backward, which needs it")


def _counts(schedule: Schedule, kinds: Sequence[Kind]) -> NDArray[np.int64]:
    """How often each (stage, microbatch) has an action of these kinds, flat."""
    rows = schedule.packed
    chosen = rows[rows_of_kinds(rows, kinds)]
    places = chosen[:, 1].astype(np.int64) * schedule.num_microbatches + chosen[:, 2]
    return np.bincount(places, minlength=schedule.num_stages * schedule.num_microbatches)


def _check_counts(schedule: Schedule, kinds: Sequence[Kind], expected: NDArray[np.int64]) -> None:
    counts = _counts(schedule, kinds).reshape(schedule.num_stages, schedule.num_microbatches)
    wrong = np.argwhere(counts != expected)
    if not len(wrong):
        return
    stage, microbatch = (int(number) for number in wrong[0])
    wanted = int(np.broadcast_to(expected, counts.shape)[stage, microbatch])
    named = [kind for kind in kinds if kind != Kind.F_PAIRED]
    names = [str(Action(kind, stage, microbatch)) for kind in named]
    places = _places(schedule, kinds, stage, microbatch)
    more = f" ({len(wrong)} such places)" if len(wrong) > 1 else ""
    rank = schedule.rank_of_stage[stage]
    if counts[stage, microbatch] < wanted:
        alternative = " or ".join(names)
        raise ScheduleError(f"{alternative} is missing on rank {rank}{more}", places)
    found = " and ".join(str(action) for _, action in places)
    if wanted == 0:
        raise ScheduleError(
            f"{found} on rank {rank} has no business there: {_why_none(schedule, kinds[0])}{more}",
            places,
        )
    raise ScheduleError(f"{found} on rank {rank}: it must happen once{more}", places)


def _why_none(schedule: Schedule, kind: Kind) -> str:
    if schedule.forward_only and kind not in (Kind.SEND_F, Kind.RECV_F):
        return "the schedule is forward only"
    if kind == Kind.W:
        return "a W belongs to an I of the same stage and microbatch, and there is none"
    if not schedule.lowered:
        return "the schedule is not marked as lowered"
    return "the stage has no neighbour on another rank on that side"


def _check_reductions(schedule: Schedule, trained: int) -> None:
    rows = schedule.packed
    counts = np.bincount(rows[rows[:, 0] == Kind.REDUCE, 1], minlength=schedule.num_stages)
    each = trained * schedule.num_microbatches
    wrong = np.flatnonzero((counts != trained) & (counts != each))
    if not len(wrong):
        return
    stage = int(wrong[0])
    action = Action(Kind.REDUCE, stage)
    rank = schedule.rank_of_stage[stage]
    or_each = f", or {each} times, once after each backward" if each > 1 else ""
    raise ScheduleError(
        f"{action} stands {counts[stage]} times on rank {rank}, it must stand {trained} "
        f"times{or_each}",
        _places(schedule, (Kind.REDUCE,), stage, NO_MICROBATCH),
    )


def _places(
    schedule: Schedule, kinds: Sequence[Kind], stage: int, microbatch: int
) -> list[tuple[int, Action]]:
    rows = schedule.packed
    same = rows_of_kinds(rows, kinds) & (rows[:, 1] == stage) & (rows[:, 2] == microbatch)
    return [placed(schedule, row) for row in np.flatnonzero(same)]


def _refuse(schedule: Schedule, wrong: NDArray[np.bool_], reason: str) -> None:
    rows = np.flatnonzero(wrong)
    if not len(rows):
        return
    rank, action = placed(schedule, rows[0])
    more = f" ({len(rows)} such actions)" if len(rows) > 1 else ""
    raise ScheduleError(f"{action} on rank {rank} {reason}{more}", [(rank, action)])


def placed(schedule: Schedule, row: int | np.integer) -> tuple[int, Action]:
    """The rank and the action of a packed row."""
    rank = int(np.searchsorted(schedule.offsets, row, side="right")) - 1
    kind, stage, microbatch = schedule.packed[row].tolist()
    return rank, Action(Kind(kind), stage, microbatch)
