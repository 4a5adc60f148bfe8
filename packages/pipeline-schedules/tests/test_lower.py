"""Lowering adds transfers and reductions and changes nothing else."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given

from trainwright.pipeline_schedules import (
    GENERATORS,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    forward_only,
    lower,
    one_f_one_b,
    sequential,
    verify,
)
from trainwright.pipeline_schedules.actions import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS
from trainwright.pipeline_schedules.testing import valid_schedules


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_generators_lower_to_schedules_free_of_deadlock_with_every_kind_of_send(name: str) -> None:
    sizes = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (3, 12), (4, 3), (5, 5), (6, 13), (8, 9)]
    for ranks, microbatches in sizes:
        lowered = lower(GENERATORS[name].make(ranks, microbatches))
        for send in ("rendezvous", "buffered", 1):
            verify(lowered, send)  # type: ignore[arg-type]


@given(schedule=valid_schedules(overlaps=True))
def test_computations_keep_their_order(schedule: Schedule) -> None:
    lowered = lower(schedule)
    for before, after in zip(schedule.actions, lowered.actions, strict=True):
        assert np.array_equal(before, after[np.isin(after[:, 0], COMPUTE_KINDS)])
    assert lowered.lowered
    assert lowered.name == schedule.name
    assert lower(lowered) is lowered


@given(schedule=valid_schedules())
def test_two_ranks_see_their_messages_of_both_directions_in_one_order(schedule: Schedule) -> None:
    owner = schedule.rank_of_stage
    seen: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, action in lower(schedule):
        if action.kind in SEND_KINDS:
            stage = action.stage + (1 if action.kind == Kind.SEND_F else -1)
            arrival = Action(Kind(action.kind + 1), stage, action.microbatch)
            seen[rank, owner[stage]].append(arrival)
        elif action.kind in RECV_KINDS:
            stage = action.stage + (-1 if action.kind == Kind.RECV_F else 1)
            seen[rank, owner[stage]].append(action)
    for (one, other), messages in seen.items():
        assert messages == seen[other, one]


@given(schedule=valid_schedules())
def test_each_stage_is_reduced_once_and_after_its_last_weight_gradient(schedule: Schedule) -> None:
    lowered = lower(schedule)
    for stage, rank in enumerate(schedule.rank_of_stage):
        kinds = [action.kind for action in lowered.program(rank) if action.stage == stage]
        last = max(index for index, kind in enumerate(kinds) if kind in (Kind.B, Kind.W))
        assert kinds.count(Kind.REDUCE) == 1
        assert kinds.index(Kind.REDUCE) > last


def test_with_two_stages_every_message_stands_where_both_ranks_expect_it() -> None:
    lowered = lower(one_f_one_b(2, 2))
    assert str(lowered) == (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD\n"
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    )


def test_one_rank_sends_nothing_and_reduces_at_the_end() -> None:
    assert str(lower(sequential(1, 2))) == "rank 0: 0F0 0B0 0F1 0B1 0REDUCE_GRAD"


KINDS = (Kind.F, Kind.F, Kind.B, Kind.B)


def test_neighbouring_stages_on_one_rank_exchange_nothing() -> None:
    actions = [[Action(kind, stage, 0) for kind, stage in zip(KINDS, (0, 1, 1, 0), strict=True)]]
    lowered = lower(Schedule(actions, [0, 0], 1))
    assert str(lowered) == "rank 0: 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"


def test_evaluation_is_not_reduced() -> None:
    lowered = lower(forward_only(2, 1))
    assert str(lowered) == "rank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0 1F0"


def test_a_schedule_that_does_not_work_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="0B0 stands before 0F0"):
        lower(Schedule([[Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]], [0], 1))
