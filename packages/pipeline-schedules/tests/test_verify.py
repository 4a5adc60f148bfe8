"""Each way in which a schedule can fail is found and named."""

from __future__ import annotations

import attrs
import pytest

from trainwright.pipeline_schedules import (
    Action,
    Kind,
    Memory,
    Schedule,
    ScheduleError,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    verify,
)
from trainwright.pipeline_schedules.deadlock import check_runs
from trainwright.pipeline_schedules.dependencies import waits
from trainwright.pipeline_schedules.testing import from_text

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


@pytest.mark.parametrize("with_transfers", [False, True])
def test_dropping_or_doubling_any_single_action_is_found(with_transfers: bool) -> None:
    schedule = lower(one_f_one_b(3, 3)) if with_transfers else one_f_one_b(3, 3)
    for rank in range(3):
        program = list(schedule.program(rank))
        for index, action in enumerate(program):
            for damaged in (program[:index] + program[index + 1 :], [*program, action]):
                actions = [schedule.program(r) if r != rank else damaged for r in range(3)]
                with pytest.raises(ScheduleError) as caught:
                    verify(attrs.evolve(schedule, actions=actions))
                assert f"{action}" in str(caught.value)
                assert f"rank {rank}" in str(caught.value)


BOTH_SEND_FIRST = """
0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1
1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1
"""


def test_two_neighbours_that_both_send_first_deadlock_unless_sends_are_buffered() -> None:
    schedule = from_text(BOTH_SEND_FIRST, [0, 1, 0, 1], 2, forward_only=True, lowered=True)
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    assert str(caught.value) == (
        "deadlock with rendezvous sends: rank 0 at 0SEND_F1 waits for rank 1 to reach 1RECV_F1; "
        "rank 1 at 1SEND_F0 waits for rank 0 to reach 2RECV_F0"
    )
    assert caught.value.places == ((0, Action(Kind.SEND_F, 0, 1)), (1, Action(Kind.SEND_F, 1, 0)))
    verify(schedule, "buffered")
    verify(schedule, 1)


def test_a_fragment_in_which_both_send_first_deadlocks_too() -> None:
    fragment = from_text(
        "0SEND_F1 2RECV_F0\n1SEND_F0 1RECV_F1", [0, 1, 0, 1], 2, forward_only=True, lowered=True
    )
    with pytest.raises(ScheduleError, match="deadlock with rendezvous sends"):
        check_runs(fragment, waits(fragment), 0)
    check_runs(fragment, waits(fragment), None)


def test_messages_received_in_another_order_than_sent_are_refused_even_when_buffered() -> None:
    text = "0F0 0F1 0SEND_F0 0SEND_F1\n1RECV_F1 1RECV_F0 1F0 1F1"
    schedule = from_text(text, [0, 1], 2, forward_only=True, lowered=True)
    with pytest.raises(ScheduleError, match="0SEND_F0 of rank 0 meets 1RECV_F1 of rank 1"):
        verify(schedule, "buffered")


def test_computations_that_wait_for_each_other_in_a_circle_are_a_deadlock() -> None:
    schedule = from_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", [0, 1], 2)
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    assert str(caught.value) == (
        "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0"
    )


@pytest.mark.parametrize(
    ("text", "flags", "reason"),
    [
        ("0F0\n1F0 1B0", {}, "0B0 or 0I0 is missing on rank 0"),
        ("0F0 0I0\n1F0 1B0", {}, "0W0 is missing on rank 0"),
        ("0F0 0B0 0W0\n1F0 1B0", {}, "0W0 on rank 0 .* there is none"),
        ("0F0 0B0 0I0 0W0\n1F0 1B0", {}, "0B0 and 0I0 on rank 0: it must happen once"),
        ("0F0 0B0 0F0\n1F0 1B0", {}, "0F0 and 0F0 on rank 0: it must happen once"),
        ("0F0 0B0 1B0\n1F0", {}, "1B0 on rank 0 is not on the rank that owns its stage"),
        ("0B0 0F0\n1F0 1B0", {}, "0B0 stands before 0F0 on rank 0, and needs it"),
        ("0F0 0W0 0I0\n1F0 1B0", {}, "0W0 stands before 0I0 on rank 0, and needs it"),
        ("0F0 0B0 2F0\n1F0 1B0", {}, "2F0 on rank 0 names no stage between 0 and 1"),
        ("0F0 0B0 0F1\n1F0 1B0", {}, "0F1 on rank 0 names no microbatch between 0 and 0"),
        ("0F0 0B0\n1F0 1B0", {"forward_only": True}, "the schedule is forward only"),
        ("0F0 0SEND_F0 0B0\n1F0 1B0", {}, "0SEND_F0 .* is not marked as lowered"),
        ("0F0 0B0 0REDUCE_GRAD\n1F0 1B0", {}, "0REDUCE_GRAD stands 1 times on rank 0"),
        ("0UNSHARD 0F0 0B0\n1F0 1B0", {}, "0UNSHARD on rank 0 .* not marked as lowered"),
        ("0F0 0B0\n1F0 1B0", {"lowered": True}, "0SEND_F0 is missing on rank 0"),
        ("0F_PAIRED0 0B0\n1F0 1B0", {}, "0F_PAIRED0 on rank 0 overlaps with its own backward"),
        ("0F_PAIRED0\n1F0 1B0", {"forward_only": True}, "1B0 on rank 1 has no business there"),
        ("0F_PAIRED0\n1F0", {"forward_only": True}, "0F_PAIRED0 on rank 0 overlaps with nothing"),
        ("0F_PAIRED0 0F0 0B0\n1F0 1B0", {}, "0F_PAIRED0 and 0F0 on rank 0: it must happen once"),
        ("0F0\n1F0", {"lowered": True, "forward_only": True}, "0SEND_F0 is missing"),
    ],
)
def test_each_fault_is_named_with_its_action_and_its_rank(
    text: str, flags: dict[str, bool], reason: str
) -> None:
    with pytest.raises(ScheduleError, match=reason):
        verify(from_text(text, [0, 1], 1, **flags))


LOWERED_BY_HAND = """
0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD
1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
"""


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0 stands before 0F0 on rank 0"),
        ("1RECV_F0 1F0", "1F0 1RECV_F0", "1F0 stands before 1RECV_F0 on rank 1"),
        ("1B0 1SEND_B0", "1SEND_B0 1B0", "1SEND_B0 stands before 1B0 on rank 1"),
        ("0RECV_B0 0B0", "0B0 0RECV_B0", "0B0 stands before 0RECV_B0 on rank 0"),
        ("0B0 0REDUCE_GRAD", "0REDUCE_GRAD 0B0", "0REDUCE_GRAD stands before 0B0 on rank 0"),
        ("0REDUCE_GRAD", "", "0REDUCE_GRAD stands 0 times on rank 0, it must stand 1 times"),
        ("1F0", "1F0 1SEND_F0", "1SEND_F0 on rank 1 .* no neighbour on another rank"),
        ("0F0", "0F0 0RECV_F0", "0RECV_F0 on rank 0 .* no neighbour on another rank"),
        ("0F0 0SEND_F0 0RECV_B0", "0F0 0RECV_B0 0SEND_F0", "deadlock with rendezvous sends"),
    ],
)
def test_each_fault_of_a_lowered_schedule_is_named(old: str, new: str, reason: str) -> None:
    verify(from_text(LOWERED_BY_HAND, [0, 1], 1, lowered=True))
    broken = LOWERED_BY_HAND.replace(old, new)
    with pytest.raises(ScheduleError, match=reason):
        verify(from_text(broken, [0, 1], 1, lowered=True))


def test_a_lowered_schedule_of_one_stage_must_reduce_too() -> None:
    verify(from_text("0F0 0B0 0REDUCE_GRAD", [0], 1, lowered=True))
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD stands 0 times on rank 0"):
        verify(from_text("0F0 0B0", [0], 1, lowered=True))
    with pytest.raises(ScheduleError, match="concerns a whole stage"):
        verify(Schedule([[(F, 0, 0), (B, 0, 0), (Kind.REDUCE, 0, 0)]], [0], 1, lowered=True))


def test_a_pair_waits_for_what_either_half_needs_and_gives_it_away_at_its_end() -> None:
    rank_of_stage = [0, 1, 1, 0]
    down = "0F0 0F1 3F0 3B0 0F_PAIRED2 0B0 3F1 3B1 0B1 3F2 3B2 0B2"
    up = "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 1F2 2F2 2B2 1B2"
    verify(from_text(f"{down}\n{up}", rank_of_stage, 3))
    # Alone, the forward could run at once; as half of a pair it waits for a backward that needs it.
    late = "0F0 0F1 3F0 3B0 0F_PAIRED2 0B0 3F1 3B1 0B1 3F2 3B2 0B2"
    circle = "1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 2B1 1B1 2B2 1B2"
    with pytest.raises(ScheduleError) as caught:
        verify(from_text(f"{late}\n{circle}", rank_of_stage, 3))
    assert str(caught.value) == (
        "deadlock: rank 0 at 0F_PAIRED2 waits for 1B0 of rank 1; rank 1 at 1F2 waits for "
        "0F_PAIRED2 of rank 0"
    )
    verify(from_text(f"{late.replace('0F_PAIRED2', '0F2')}\n{circle}", rank_of_stage, 3))


def test_nothing_comes_between_the_two_halves_of_a_pair() -> None:
    text = "0UNSHARD 0F0 1F0 0F_PAIRED1 1B0 0B0 0RESHARD 1F1 1B1 0UNSHARD 0B1 0RESHARD"
    text += " 0REDUCE_GRAD 1REDUCE_GRAD"
    verify(from_text(text, [0, 0], 2, lowered=True))
    apart = text.replace("0F_PAIRED1 1B0 0B0 0RESHARD", "0F_PAIRED1 0RESHARD 1B0 0UNSHARD 0B0")
    with pytest.raises(ScheduleError, match="0F_PAIRED1 on rank 0 overlaps with nothing"):
        verify(from_text(apart, [0, 0], 2, lowered=True))


def test_many_faults_of_one_kind_are_counted() -> None:
    schedule = attrs.evolve(forward_only(2, 5), forward_only=False)
    with pytest.raises(ScheduleError, match=r"0B0 or 0I0 is missing on rank 0 \(10 such places\)"):
        verify(schedule)


def test_a_rank_above_its_memory_limit_is_named_with_both_numbers() -> None:
    verify(one_f_one_b(4, 8), memory_limit=4)
    verify(one_f_one_b(4, 8), memory_limit=[4, 3, 2, 1])
    with pytest.raises(ScheduleError, match="rank 1 holds up to 3, its limit is 2"):
        verify(one_f_one_b(4, 8), memory_limit=[4, 2, 2, 1])
    with pytest.raises(ScheduleError, match="rank 0 holds up to 16, its limit is 15"):
        verify(gpipe(4, 8), memory=Memory(forward_to_input=2.0), memory_limit=15)
    with pytest.raises(ScheduleError, match="one for each of 4 ranks"):
        verify(gpipe(4, 8), memory_limit=[1, 2])


def test_an_unknown_kind_of_send_is_refused() -> None:
    for wrong in ("blocking", -1, True, 1.5):
        with pytest.raises(ScheduleError, match="send must be"):
            verify(gpipe(1, 1), wrong)  # type: ignore[arg-type]
