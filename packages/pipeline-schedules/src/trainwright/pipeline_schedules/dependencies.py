"""What an action waits for, and when it can run: the graph that verifier and simulator share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import (
    BACKWARD_KINDS,
    COMPUTE_KINDS,
    FORWARD_KINDS,
    Kind,
)
from trainwright.pipeline_schedules.pairs import pair_rows
from trainwright.pipeline_schedules.schedule import Rows, Schedule

RowNumbers = NDArray[np.int32]
"""For each row of a packed schedule the number of another row, or the number of rows for none."""


_WIDE = 32
"""From so many ranks on, a numpy call for all ranks is faster than a loop over their rows."""


@attrs.frozen(eq=False)
class Waits:
    """Rows that other rows wait for: ``needs[i]`` must be done before row i, with some delay.

    Args:
        needs: Row numbers, int32 ``[n]``; n itself where the row waits for nothing.
        delay: Time between the end of the row waited for and the earliest start, ``[n]``, or None.
    """

    needs: RowNumbers
    delay: NDArray[np.float64] | None = None


@attrs.frozen(eq=False)
class Stuck:
    """Where each rank stands when nothing can run any more: row numbers, -1 where finished."""

    rows: NDArray[np.int64]


def earliest_times(
    offsets: NDArray[np.int64], durations: NDArray[np.float64], waits: Sequence[Waits]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | Stuck:
    """Let every rank run its rows in order, each as soon as what it waits for is done.

    Returns:
        Starts and ends of all rows, or where the ranks are stuck.
    """
    run = _in_rounds if len(offsets) - 1 >= _WIDE else _one_by_one
    return run(offsets, durations, waits)


def _in_rounds(
    offsets: NDArray[np.int64], durations: NDArray[np.float64], waits: Sequence[Waits]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | Stuck:
    """Visit one row of every rank at once, so that numpy calls follow the longest chain only."""
    num_rows = len(durations)
    starts = np.zeros(num_rows)
    ends = np.full(num_rows + 1, np.inf)
    ends[num_rows] = -np.inf
    position = offsets[:-1].copy()
    free = np.zeros(len(position))
    active = np.flatnonzero(position < offsets[1:])
    while len(active):
        rows = position[active]
        start = free[active]
        for wait in waits:
            done = ends[wait.needs[rows]]
            start = np.maximum(start, done if wait.delay is None else done + wait.delay[rows])
        ready = start < np.inf
        if not ready.any():
            stuck = np.full(len(position), -1, dtype=np.int64)
            stuck[active] = rows
            return Stuck(stuck)
        rows, ranks = rows[ready], active[ready]
        starts[rows] = start[ready]
        free[ranks] = ends[rows] = start[ready] + durations[rows]
        position[ranks] += 1
        active = active[position[active] < offsets[active + 1]]
    return starts, ends[:-1]


def _one_by_one(
    offsets: NDArray[np.int64], durations: NDArray[np.float64], waits: Sequence[Waits]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | Stuck:
    """Let a rank run until it waits, and go on with it when what it waits for is done."""
    num_rows = len(durations)
    needs = [wait.needs.tolist() for wait in waits]
    delays = [[0.0] * num_rows if w.delay is None else w.delay.tolist() for w in waits]
    arrivals = list(zip(needs, delays, strict=True))
    lengths = durations.tolist()
    starts = [0.0] * num_rows
    ends = [math.inf] * num_rows + [-math.inf]
    position = offsets[:-1].tolist()
    stops = offsets[1:].tolist()
    sleepers: dict[int, list[int]] = {}
    runnable = list(range(len(position)))
    while runnable:
        rank = runnable.pop()
        row = position[rank]
        free = ends[row - 1] if row > int(offsets[rank]) else 0.0
        while row < stops[rank]:
            start = free
            for needed, delay in arrivals:
                arrival = ends[needed[row]] + delay[row]
                if arrival > start:
                    start = arrival
            if start == math.inf:
                missing = next(needed[row] for needed in needs if ends[needed[row]] == math.inf)
                sleepers.setdefault(missing, []).append(rank)
                break
            starts[row] = start
            free = ends[row] = start + lengths[row]
            if row in sleepers:
                runnable += sleepers.pop(row)
            row += 1
        position[rank] = row
    if sleepers:
        ended = zip(position, stops, strict=True)
        return Stuck(np.array([-1 if row == stop else row for row, stop in ended]))
    return np.array(starts), np.array(ends[:-1])


def rows_of_kinds(rows: Rows, kinds: Sequence[Kind]) -> NDArray[np.bool_]:
    """Which rows are of one of the kinds."""
    chosen = np.zeros(max(Kind) + 1, dtype=np.bool_)
    chosen[list(kinds)] = True
    return chosen[rows[:, 0]]


def row_table(schedule: Schedule, kinds: Sequence[Kind], missing: int) -> RowNumbers:
    """Where each (stage, microbatch) has its action of one of the kinds: int32 ``[stages, m]``.

    Of several the last counts; ``missing`` stands where there is none.
    """
    rows = schedule.packed
    table = np.full((schedule.num_stages, schedule.num_microbatches), missing, dtype=np.int32)
    chosen = np.flatnonzero(rows_of_kinds(rows, kinds))
    table[rows[chosen, 1], rows[chosen, 2]] = chosen
    return table


def waits(schedule: Schedule, latency: NDArray[np.float64] | float = 0.0) -> tuple[Waits, Waits]:
    """What every action waits for, given that each action it needs exists once.

    The first holds what comes from a neighbouring stage: for F the F of the stage before, for B
    and I the B or I of the stage behind; where the schedule is lowered and the stages are on
    different ranks the receive stands between, and waits for its send. The second holds what comes
    from the own stage: for B and I the F, for W the I, for a send what it sends, for a reduction
    its last weight gradient; and for the forward of a pair what its backward gets from behind.

    Args:
        schedule: Known to be complete.
        latency: Delay of a boundary between stages on different ranks, one number or one for
            each boundary, ``[stages - 1]``.
    """
    none = schedule.num_actions
    ranks = np.asarray(schedule.rank_of_stage)
    crosses = ranks[1:] != ranks[:-1]
    forward = row_table(schedule, FORWARD_KINDS, none)
    backward = row_table(schedule, BACKWARD_KINDS, none)
    # Row s of these: what stage s gets from the stage before, or from the stage behind.
    from_before = np.full_like(forward, none)
    from_before[1:] = forward[:-1]
    from_behind = np.full_like(backward, none)
    from_behind[:-1] = backward[1:]
    neighbour = np.full(none, none, dtype=np.int32)
    own = np.full(none, none, dtype=np.int32)
    if schedule.lowered:
        send_f = row_table(schedule, (Kind.SEND_F,), none)
        send_b = row_table(schedule, (Kind.SEND_B,), none)
        _fill(neighbour, schedule, (Kind.RECV_F,), np.roll(send_f, 1, axis=0))
        _fill(neighbour, schedule, (Kind.RECV_B,), np.roll(send_b, -1, axis=0))
        from_before[1:][crosses] = row_table(schedule, (Kind.RECV_F,), none)[1:][crosses]
        from_behind[:-1][crosses] = row_table(schedule, (Kind.RECV_B,), none)[:-1][crosses]
        _fill(own, schedule, (Kind.SEND_F,), forward)
        _fill(own, schedule, (Kind.SEND_B,), backward)
        _fill_reductions(own, schedule)
    _fill(neighbour, schedule, FORWARD_KINDS, from_before)
    _fill(neighbour, schedule, BACKWARD_KINDS, from_behind)
    _fill(own, schedule, BACKWARD_KINDS, forward)
    _fill(own, schedule, (Kind.W,), backward)
    delay = _delays(schedule, np.where(crosses, latency, 0.0))
    return Waits(neighbour, delay), _with_pairs(schedule, own, neighbour, delay)


def _with_pairs(
    schedule: Schedule,
    own: RowNumbers,
    neighbour: RowNumbers,
    delay: NDArray[np.float64] | None,
) -> Waits:
    """Let the forward of a pair, which needs nothing of its own stage, wait for its backward's."""
    forwards = pair_rows(schedule)
    own[forwards] = neighbour[forwards + 1]
    if delay is None or not len(forwards):
        return Waits(own)
    own_delay = np.zeros_like(delay)
    own_delay[forwards] = delay[forwards + 1]
    return Waits(own, own_delay)


def _fill(needs: RowNumbers, schedule: Schedule, kinds: Sequence[Kind], table: RowNumbers) -> None:
    """Let the rows of these kinds wait for what the table holds at their stage and microbatch."""
    rows = schedule.packed
    chosen = np.flatnonzero(rows_of_kinds(rows, kinds))
    needs[chosen] = table[rows[chosen, 1], rows[chosen, 2]]


def _fill_reductions(needs: RowNumbers, schedule: Schedule) -> None:
    """Let the last reduction of a stage wait for its last weight gradient, and so on backwards.

    One reduction so waits for all of them, and of as many as there are gradients each for its own.
    """
    reductions, last_reductions = rows_by_stage(schedule, (Kind.REDUCE,))
    gradients, last_gradients = rows_by_stage(schedule, (Kind.B, Kind.W))
    stages = schedule.packed[reductions, 1]
    place = np.arange(len(reductions)) + (last_gradients - last_reductions)[stages + 1]
    inside = place >= last_gradients[stages]
    needs[reductions[inside]] = gradients[place[inside]]


def rows_by_stage(
    schedule: Schedule, kinds: Sequence[Kind]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows of some kinds, stage after stage, in order; and each stage's bounds in them.

    Returns:
        Row numbers ``[n]``, and bounds ``[stages + 1]``.
    """
    rows = schedule.packed
    chosen = np.flatnonzero(rows_of_kinds(rows, kinds))
    chosen = chosen[np.argsort(rows[chosen, 1], kind="stable")]
    return chosen, np.searchsorted(rows[chosen, 1], np.arange(schedule.num_stages + 1))


def _delays(schedule: Schedule, hop: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """The delay before each F, B and I; none at all where no boundary has one."""
    if not hop.any():
        return None
    rows = schedule.packed
    delay = np.zeros(schedule.num_actions)
    chosen = np.flatnonzero(rows_of_kinds(rows, FORWARD_KINDS))
    delay[chosen] = np.concatenate([[0.0], hop])[rows[chosen, 1]]
    chosen = np.flatnonzero(rows_of_kinds(rows, BACKWARD_KINDS))
    delay[chosen] = np.concatenate([hop, [0.0]])[rows[chosen, 1]]
    return delay


def only_compute(schedule: Schedule) -> Schedule:
    """The same schedule without transfers, reductions and other actions that do not compute."""
    if not schedule.lowered:
        return schedule
    actions: list[Rows] = [rows[rows_of_kinds(rows, COMPUTE_KINDS)] for rows in schedule.actions]
    return Schedule(
        actions,
        schedule.rank_of_stage,
        schedule.num_microbatches,
        schedule.name,
        forward_only=schedule.forward_only,
    )
