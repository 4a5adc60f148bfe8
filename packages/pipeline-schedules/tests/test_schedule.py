"""Schedules and actions are values."""

from __future__ import annotations

import copy
import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    action_letters,
    gpipe,
    lower,
    one_f_one_b,
    to_csv,
)
from trainwright.pipeline_schedules.actions import STAGE_KINDS
from trainwright.pipeline_schedules.testing import valid_schedules


def test_equal_schedules_have_equal_hashes_and_a_name_is_only_a_label() -> None:
    schedule = one_f_one_b(3, 4)
    again = attrs.evolve(one_f_one_b(3, 4), name="another")
    assert schedule == again
    assert hash(schedule) == hash(again)
    assert len({schedule, again}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"rank_of_stage": (0, 2, 1)},
        {"num_microbatches": 5},
        {"forward_only": True},
        {"lowered": True},
        {"actions": gpipe(3, 4).actions},
        {"actions": (*one_f_one_b(3, 4).actions, [])},
    ],
)
def test_schedules_that_differ_in_anything_that_runs_are_unequal(change: dict[str, object]) -> None:
    schedule = one_f_one_b(3, 4)
    assert schedule != attrs.evolve(schedule, **change)
    assert schedule != "a schedule"


def test_the_same_rows_cut_differently_between_ranks_are_unequal() -> None:
    rows = [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)]
    assert Schedule([rows, []], [0], 2) != Schedule([rows[:1], rows[1:]], [0], 2)


def test_rows_are_read_only_int32_and_share_one_buffer() -> None:
    schedule = one_f_one_b(3, 4)
    assert schedule.packed.dtype == np.int32
    assert schedule.packed.shape == (24, 3)
    for rank, rows in enumerate(schedule.actions):
        assert np.shares_memory(rows, schedule.packed)
        assert np.array_equal(rows, schedule.packed[8 * rank : 8 * rank + 8])
        with pytest.raises(ValueError, match="read-only"):
            rows[0, 0] = 1
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        schedule.name = "other"  # type: ignore[misc]


def test_a_schedule_does_not_change_with_the_array_it_was_made_of() -> None:
    rows = np.array([[Kind.F, 0, 0], [Kind.B, 0, 0]], dtype=np.int32)
    schedule = Schedule([rows], [0], 1)
    rows[0, 0] = Kind.W
    assert action_letters(schedule, 0) == ["0F0", "0B0"]


@given(schedule=valid_schedules())
def test_a_copied_or_pickled_schedule_is_equal_and_still_read_only(schedule: Schedule) -> None:
    for twin in (pickle.loads(pickle.dumps(schedule)), copy.deepcopy(schedule)):
        assert twin == schedule
        assert twin.name == schedule.name
        assert not twin.packed.flags.writeable


@given(schedule=valid_schedules())
def test_a_schedule_made_of_its_own_actions_is_the_same(schedule: Schedule) -> None:
    programs = [schedule.program(rank) for rank in range(schedule.num_ranks)]
    again = attrs.evolve(schedule, actions=programs)
    assert again == schedule
    flat = [(rank, action) for rank, program in enumerate(programs) for action in program]
    assert list(schedule) == flat


def test_a_schedule_prints_a_line_a_rank_and_represents_itself_in_one_line() -> None:
    schedule = one_f_one_b(2, 2)
    assert str(schedule) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    assert repr(schedule) == "<Schedule 1f1b: 2 stages on 2 ranks, 2 microbatches, 8 actions>"


def test_stages_of_a_rank_are_those_that_it_owns() -> None:
    schedule = Schedule([[], [], []], [0, 1, 1, 0], 1)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 2), ()]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Schedule([], [0], 1), "at least one rank"),
        (lambda: Schedule([[]], [], 1), "at least one stage"),
        (lambda: Schedule([[]], [0], 0), "num_microbatches must be at least 1, got 0"),
        (lambda: Schedule([[]], [0, 1], 1), "stage 1 is on rank 1"),
        (lambda: Schedule([[]], [-1], 1), "stage 0 is on rank -1"),
        (lambda: Schedule([[(0, 0)]], [0], 1), r"actions of rank 0 .* shape \[1, 2\]"),
        (lambda: Schedule([[(0.5, 0, 0)]], [0], 1), "must be integers"),
        (lambda: Schedule([[(0, 0, 2**40)]], [0], 1), "must fit int32"),
        (lambda: Schedule([[(12, 0, 0)]], [0], 1), r"kinds must lie .* got \[12\]"),
        (lambda: Schedule([[(-1, 0, 0)]], [0], 1), r"kinds must lie .* got \[-1\]"),
    ],
)
def test_what_has_not_the_form_of_a_schedule_is_refused(make: object, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        make()  # type: ignore[operator]


@given(
    kind=st.sampled_from([kind for kind in Kind if kind != Kind.F_PAIRED]),
    stage=st.integers(0, 2000),
    microbatch=st.integers(0, 5000),
)
def test_an_action_reads_back_from_what_it_prints(kind: Kind, stage: int, microbatch: int) -> None:
    action = Action(kind, stage) if kind in STAGE_KINDS else Action(kind, stage, microbatch)
    assert Action.parse(str(action)) == action


def test_actions_print_as_pytorch_writes_them() -> None:
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.SEND_F, Kind.RECV_B)
    assert [str(Action(kind, 1, 3)) for kind in kinds] == [
        "1F3", "1B3", "1I3", "1W3", "1SEND_F3", "1RECV_B3",
    ]  # fmt: skip
    stage_kinds = (Kind.REDUCE, Kind.GATHER, Kind.RELEASE)
    assert [str(Action(kind, 2)) for kind in stage_kinds] == [
        "2REDUCE_GRAD", "2UNSHARD", "2RESHARD",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X1", "0REDUCE_GRAD3", "-1F0", "0F0 1F0"])
def test_text_that_is_no_action_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action") as caught:
        Action.parse(text)
    assert repr(text) in str(caught.value)


def test_the_table_form_has_a_line_a_rank_with_commas_between_actions() -> None:
    assert to_csv(gpipe(2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert to_csv(lower(gpipe(2, 1))) == (
        "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
