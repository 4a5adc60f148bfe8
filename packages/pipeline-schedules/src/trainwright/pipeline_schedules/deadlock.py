"""Whether all ranks reach the end, given how much a channel holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import RECV_KINDS, SEND_KINDS, Kind
from trainwright.pipeline_schedules.completeness import placed
from trainwright.pipeline_schedules.dependencies import (
    Stuck,
    Waits,
    earliest_times,
    rows_of_kinds,
)
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule

_ROOM = 2
"""Place of the waits for room in a channel, behind those for neighbours and the own stage."""


def check_ordered(schedule: Schedule, needed: Sequence[Waits]) -> None:
    """What an action needs from its own rank stands above it."""
    ranks = np.repeat(np.arange(schedule.num_ranks), np.diff(schedule.offsets))
    rank_of_row = np.append(ranks, -1)
    for wait in needed:
        late = (rank_of_row[wait.needs] == ranks) & (wait.needs > np.arange(len(ranks)))
        if late.any():
            row = int(np.flatnonzero(late)[0])
            rank, action = placed(schedule, row)
            later = placed(schedule, wait.needs[row])
            raise ScheduleError(
                f"{action} stands before {later[1]} on rank {rank}, and needs it",
                [(rank, action), later],
            )


def check_channels(schedule: Schedule) -> None:
    """Between two ranks, messages of one direction are received in the order they are sent."""
    sends, receives, _ = channel_rows(schedule)
    rows = schedule.packed
    sent = rows[sends].copy()
    sent[:, 1] += np.where(sent[:, 0] == Kind.SEND_F, 1, -1)
    sent[:, 0] += 1
    crossed = np.flatnonzero((sent != rows[receives]).any(axis=1))
    if len(crossed):
        source = placed(schedule, sends[crossed[0]])
        target = placed(schedule, receives[crossed[0]])
        raise ScheduleError(
            f"{source[1]} of rank {source[0]} meets {target[1]} of rank {target[0]}: between two "
            "ranks, messages must be received in the order in which they are sent",
            [source, target],
        )


def channel_rows(
    schedule: Schedule,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sends and receives paired in order within each directed pair of ranks.

    Returns:
        Row numbers of sends, row numbers of the receives they meet, and the place of each within
        its channel; sorted by channel.
    """
    rows = schedule.packed
    owner = np.asarray(schedule.rank_of_stage)
    sends = np.flatnonzero(rows_of_kinds(rows, SEND_KINDS))
    receives = np.flatnonzero(rows_of_kinds(rows, RECV_KINDS))
    step = np.where(rows[sends, 0] == Kind.SEND_F, 1, -1)
    source, target = owner[rows[sends, 1]], owner[rows[sends, 1] + step]
    send_channel = source * schedule.num_ranks + target
    step = np.where(rows[receives, 0] == Kind.RECV_F, -1, 1)
    source, target = owner[rows[receives, 1] + step], owner[rows[receives, 1]]
    receive_channel = source * schedule.num_ranks + target
    by_channel = np.argsort(send_channel, kind="stable")
    channels = send_channel[by_channel]
    place = np.arange(len(channels)) - np.searchsorted(channels, channels)
    return (
        sends[by_channel],
        receives[np.argsort(receive_channel, kind="stable")],
        place,
    )


def check_runs(schedule: Schedule, needed: Sequence[Waits], capacity: int | None) -> None:
    """Every rank reaches its last action when each directed pair of ranks holds so many messages.

    Args:
        schedule: Complete, ordered and with channels in order.
        needed: What its actions wait for.
        capacity: Messages a channel holds; 0 for rendezvous, None for no bound.
    """
    if schedule.lowered and capacity is not None:
        needed = [*needed, _room(schedule, capacity)]
    durations = np.ones(schedule.num_actions)
    outcome = earliest_times(schedule.offsets, durations, needed)
    if isinstance(outcome, Stuck):
        raise explain(schedule, needed, outcome, capacity)


def _room(schedule: Schedule, capacity: int) -> Waits:
    """What a send waits for until the channel takes its message."""
    none = schedule.num_actions
    sends, receives, place = channel_rows(schedule)
    needs = np.full(none, none, dtype=np.int32)
    if capacity == 0:
        # The receiver must have done everything that stands before the receive.
        first = np.isin(receives, schedule.offsets[:-1])
        needs[sends] = np.where(first, none, receives - 1)
    else:
        behind = np.flatnonzero(place >= capacity)
        needs[sends[behind]] = receives[behind - capacity]
    return Waits(needs)


def explain(
    schedule: Schedule, needed: Sequence[Waits], stuck: Stuck, capacity: int | None
) -> ScheduleError:
    """Say who waits for whom in a circle: follow one stuck rank until a rank comes up again."""
    rank = int(np.flatnonzero(stuck.rows >= 0)[0])
    chain: list[int] = []
    sentences: dict[int, str] = {}
    while rank not in sentences:
        chain.append(rank)
        row = int(stuck.rows[rank])
        waited_for, for_room = _first_unmet(schedule, needed, stuck, row)
        if for_room and capacity == 0:
            other, receive = placed(schedule, waited_for + 1)
            reason = f"rank {other} to reach {receive}"
        elif for_room:
            other, receive = placed(schedule, waited_for)
            reason = f"the room that {receive} of rank {other} makes"
        else:
            other, action = placed(schedule, waited_for)
            reason = f"{action} of rank {other}"
        sentences[rank] = f"rank {rank} at {placed(schedule, row)[1]} waits for {reason}"
        rank = other
    circle = chain[chain.index(rank) :]
    sends = f" with {_name_of(capacity)} sends" if schedule.lowered else ""
    return ScheduleError(
        f"deadlock{sends}: " + "; ".join(sentences[member] for member in circle),
        [placed(schedule, stuck.rows[member]) for member in circle],
    )


def _first_unmet(
    schedule: Schedule, needed: Sequence[Waits], stuck: Stuck, row: int
) -> tuple[int, bool]:
    """The first row that a stuck row waits for, and whether it does for room in a channel."""
    for number, wait in enumerate(needed):
        other = int(wait.needs[row])
        if other == schedule.num_actions:
            continue
        at = int(stuck.rows[placed(schedule, other)[0]])
        if 0 <= at <= other:
            return other, number == _ROOM
    raise AssertionError("a stuck rank waits for something")


def _name_of(capacity: int | None) -> str:
    if capacity is None:
        return "buffered"
    return "rendezvous" if capacity == 0 else f"{capacity}-message"
