"""From what is computed to what is also sent, received, gathered and reduced."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import (
    BACKWARD_KINDS,
    FORWARD_KINDS,
    NO_MICROBATCH,
    Kind,
)
from trainwright.pipeline_schedules.deadlock import explain
from trainwright.pipeline_schedules.dependencies import (
    Stuck,
    Waits,
    earliest_times,
    rows_of_kinds,
)
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.pairs import as_blocks, begin_together, pair_rows
from trainwright.pipeline_schedules.schedule import Rows, Schedule
from trainwright.pipeline_schedules.stays import stays_under
from trainwright.pipeline_schedules.verify import check_all_but_running
from trainwright.pipeline_schedules.weight_plan import WeightPlan

# At one instant messages come first, so that what is ready travels before the next computation,
# and a release before the gather that needs its room.
_MESSAGE, _RELEASE, _REDUCTION, _GATHER, _COMPUTATION = range(5)
_EXPECTED_COST = {Kind.F: 1.0, Kind.F_PAIRED: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}


def lower(schedule: Schedule, weights: WeightPlan | None = None) -> Schedule:
    """Add the transfers between ranks, reductions, and gathers and releases of sharded weights.

    The order cannot deadlock, not even where a send waits for its receive: all computations and
    messages stand in one total order in time (of a run at F = I = W = 1, B = 2), a message when
    its sender is done, and each rank's list is what of that order concerns it. So the earliest
    thing that is not done can always be done. Between two ranks, messages of both directions
    (which for two stages share a peer) stand in the same order on both sides; transports
    without tags pair them right. Neighbouring stages on one rank need no transfer.

    Data-parallel peers run the same list, so that their gathers and reductions meet; these stand
    in the same total order, so that they cannot deadlock either.

    Args:
        schedule: What is computed.
        weights: When weights are gathered and released, and gradients reduced. None: weights are
            whole all the time, and a stage is reduced once, after its last weight gradient.

    Returns:
        The lowered schedule; a lowered one is returned as it is.

    Raises:
        ScheduleError: The schedule does not verify, the plan does not fit it, or there is a plan
            and the schedule is lowered already.
    """
    if schedule.lowered and weights is None:
        return schedule
    if schedule.lowered:
        raise ScheduleError(
            "the schedule is lowered already, so that it cannot follow a weight plan any more; "
            "lower the schedule of computations with the plan"
        )
    plan = WeightPlan(stages=()) if weights is None else weights
    starts, ends = _expected_times(schedule, check_all_but_running(schedule))
    ranks = np.repeat(np.arange(schedule.num_ranks), np.diff(schedule.offsets))
    computations = _Events(schedule.packed, ranks, starts, _COMPUTATION)
    events = [computations, *_messages(schedule, ends), *_stays(schedule, plan, starts, ends)]
    if not schedule.forward_only:
        events.append(_reductions(schedule, plan, ends))
    actions = _in_order(events, schedule.num_ranks)
    return Schedule(
        actions,
        schedule.rank_of_stage,
        schedule.num_microbatches,
        schedule.name,
        forward_only=schedule.forward_only,
        lowered=True,
    )


@attrs.frozen(eq=False)
class _Events:
    """Rows to place: on which rank, at what time, in which class among equal times."""

    rows: Rows
    ranks: NDArray[np.int64]
    times: NDArray[np.float64]
    order: int
    tie: NDArray[np.int64] | None = None


def _expected_times(
    schedule: Schedule, needed: Sequence[Waits]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    cost_of_kind = np.zeros(max(Kind) + 1)
    for kind, cost in _EXPECTED_COST.items():
        cost_of_kind[kind] = cost
    durations = cost_of_kind[schedule.packed[:, 0]]
    forwards = pair_rows(schedule)
    blocks = as_blocks(durations, forwards, durations[forwards] + durations[forwards + 1])
    times = earliest_times(schedule.offsets, blocks, needed)
    if isinstance(times, Stuck):
        raise explain(schedule, needed, times, None)
    # So that nothing comes between the two rows of a pair.
    begin_together(times[0], forwards)
    return times


def _messages(schedule: Schedule, ends: NDArray[np.float64]) -> list[_Events]:
    """Both ends of every transfer, at the time when the sender is done."""
    rows = schedule.packed
    owner = np.asarray(schedule.rank_of_stage)
    forward = rows_of_kinds(rows, FORWARD_KINDS)
    backward = rows_of_kinds(rows, BACKWARD_KINDS)
    events = []
    for producers, step, send, recv in (
        (forward, 1, Kind.SEND_F, Kind.RECV_F),
        (backward, -1, Kind.SEND_B, Kind.RECV_B),
    ):
        target = rows[:, 1] + step
        inside = producers & (target >= 0) & (target < schedule.num_stages)
        inside[inside] = owner[target[inside]] != owner[rows[inside, 1]]
        chosen = np.flatnonzero(inside)
        for kind, stages in ((send, rows[chosen, 1]), (recv, target[chosen])):
            end = np.stack([np.full_like(stages, kind), stages, rows[chosen, 2]], axis=1)
            # The producing row breaks ties, the same way on both ranks.
            events.append(_Events(end, owner[stages], ends[chosen], _MESSAGE, tie=chosen))
    return events


def _stays(
    schedule: Schedule,
    plan: WeightPlan,
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
) -> list[_Events]:
    """A gather ahead of each stay, as late as it can overlap what stands before, and a release."""
    stays = stays_under(schedule, plan)
    stages = np.array([stay.stage for stay in stays], dtype=np.int32)
    first = np.array([stay.first for stay in stays], dtype=np.int64)
    last = np.array([stay.last for stay in stays], dtype=np.int64)
    owner = np.asarray(schedule.rank_of_stage)[stages]
    # Where room is short, what stands before must have ended; then the gather overlaps waiting.
    ahead = np.array([stay.ahead for stay in stays], dtype=np.bool_)
    begin = np.where(ahead, starts[first - 1], ends[first - 1])
    begin = np.where(np.isin(first, schedule.offsets[:-1]), 0.0, begin)
    return [
        _Events(_whole_stage(Kind.GATHER, stages), owner, begin, _GATHER),
        _Events(_whole_stage(Kind.RELEASE, stages), owner, ends[last], _RELEASE),
    ]


def _reductions(schedule: Schedule, plan: WeightPlan, ends: NDArray[np.float64]) -> _Events:
    """One reduction a stage, when its last weight gradient is there, or one for each."""
    rows = schedule.packed
    chosen = np.flatnonzero((rows[:, 0] == Kind.B) | (rows[:, 0] == Kind.W))
    stages = rows[chosen, 1]
    times = ends[chosen]
    if not plan.reduce_each_backward:
        stages = np.arange(schedule.num_stages, dtype=np.int32)
        times = np.zeros(schedule.num_stages)
        np.maximum.at(times, rows[chosen, 1], ends[chosen])
    owner = np.asarray(schedule.rank_of_stage)[stages]
    return _Events(_whole_stage(Kind.REDUCE, stages), owner, times, _REDUCTION)


def _whole_stage(kind: Kind, stages: NDArray[np.int32]) -> Rows:
    columns = [np.full_like(stages, kind), stages, np.full_like(stages, NO_MICROBATCH)]
    return np.stack(columns, axis=1)


def _in_order(events: list[_Events], num_ranks: int) -> list[Rows]:
    rows = np.concatenate([part.rows for part in events])
    ranks = np.concatenate([part.ranks for part in events])
    times = np.concatenate([part.times for part in events])
    order = np.concatenate([np.full(len(part.rows), part.order, np.int8) for part in events])
    tie = np.concatenate(
        [np.zeros(len(part.rows), np.int64) if part.tie is None else part.tie for part in events]
    )
    sequence = np.lexsort((tie, order, times, ranks))
    bounds = np.searchsorted(ranks[sequence], np.arange(num_ranks + 1))
    sorted_rows = rows[sequence]
    return [sorted_rows[bounds[rank] : bounds[rank + 1]] for rank in range(num_ranks)]
