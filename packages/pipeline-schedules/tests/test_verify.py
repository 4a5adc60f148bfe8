"""What `verify` accepts is what a second, plain interpreter runs to its end."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from trainwright.pipeline_schedules.testing import damages, generated_schedules, valid_schedules
from trainwright.pipeline_schedules.verify import Sends

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
SENDS: tuple[Sends, ...] = ("rendezvous", "buffered", 1, 2)


def runs_to_its_end(schedule: Schedule, capacity: int | None) -> bool:
    """Run a schedule fact by fact; a channel holds ``capacity`` messages, None for any number."""
    owner, m, last = schedule.rank_of_stage, schedule.num_microbatches, schedule.num_stages - 1
    left = [deque(schedule.program(rank)) for rank in range(schedule.num_ranks)]
    facts = {("input", 0, i) for i in range(m)}
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
    if any(a.stage > last or owner[a.stage] != rank for rank, a in schedule):
        return False

    def apart(s: int) -> bool:
        return 0 <= s < last and schedule.lowered and owner[s] != owner[s + 1]

    def rule(a: Action) -> tuple[list[str], list[tuple[str, int]]]:
        """Facts that an action needs about its stage, and facts that it makes, of which stage."""
        s, forth, back = a.stage, [] if apart(a.stage) else [1], [] if apart(a.stage - 1) else [-1]
        after = [("gradient", s)] if s == last else [("input", s + step) for step in forth]
        before = [("gradient", s + step) for step in back]
        return {
            F: (["input"], [("output", s), *after]),
            B: (["output", "gradient"], [("backward", s), ("weights", s), *before]),
            I: (["output", "gradient"], [("backward", s), ("half", s), *before]),
            W: (["half"], [("weights", s)]),
            Kind.SEND_F: (["output"], []),
            Kind.RECV_F: ([], [("input", s)]),
            Kind.SEND_B: (["backward"], []),
            Kind.RECV_B: ([], [("gradient", s)]),
            Kind.REDUCE: (["weights"], []),
        }[a.kind]

    def step(rank: int) -> bool:
        if not left[rank]:
            return False
        a = left[rank][0]
        needed, made = rule(a)
        numbers = range(m) if a.kind == Kind.REDUCE else [a.microbatch]
        if any((fact, a.stage, i) not in facts for fact in needed for i in numbers):
            return False
        toward = {Kind.SEND_F: 1, Kind.SEND_B: -1, Kind.RECV_F: -1, Kind.RECV_B: 1}.get(a.kind, 0)
        peer = owner[a.stage + toward] if 0 <= a.stage + toward <= last else rank
        if a.kind in (Kind.SEND_F, Kind.SEND_B):
            message = Action(Kind(a.kind + 1), a.stage + toward, a.microbatch)
            if capacity == 0 and not (left[peer] and left[peer][0] == message):
                return False
            if capacity and len(channels[rank, peer]) >= capacity:
                return False
            channels[rank, peer].append(message)
        if a.kind in (Kind.RECV_F, Kind.RECV_B):
            if not channels[peer, rank] or channels[peer, rank][0] != a:
                return False
            channels[peer, rank].popleft()
        facts.update((fact, stage, a.microbatch) for fact, stage in made)
        left[rank].popleft()
        return True

    while any(step(rank) for rank in range(schedule.num_ranks)):
        pass
    count = Counter(action for _, action in schedule)
    back = int(not schedule.forward_only)
    for s, i in itertools.product(range(last + 1), range(m)):
        wanted = [1, back, count[Action(I, s, i)]]
        wanted += [apart(s), apart(s - 1), apart(s - 1) * back, apart(s) * back]
        counted = [count[Action(F, s, i)], count[Action(B, s, i)] + count[Action(I, s, i)]]
        kinds = (W, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
        if counted + [count[Action(kind, s, i)] for kind in kinds] != wanted:
            return False
    reduced = [count[Action(Kind.REDUCE, s)] for s in range(last + 1)]
    return not any(left) and reduced == [int(schedule.lowered) * back] * (last + 1)


def accepted(schedule: Schedule, send: Sends) -> bool:
    try:
        verify(schedule, send)
    except ScheduleError:
        return False
    return True


def interpreted(schedule: Schedule, send: Sends) -> bool:
    capacity = {"rendezvous": 0, "buffered": None}.get(str(send), send)
    return runs_to_its_end(schedule, capacity)  # type: ignore[arg-type]


@given(schedule=st.one_of(generated_schedules(), valid_schedules()), send=st.sampled_from(SENDS))
def test_valid_schedules_and_their_lowerings_work_with_every_kind_of_send(
    schedule: Schedule, send: Sends
) -> None:
    for one in (schedule, lower(schedule)):
        verify(one, send)
        assert interpreted(one, send)


@settings(max_examples=300)
@given(
    schedule=st.one_of(
        generated_schedules(max_stages=4, max_microbatches=4), valid_schedules(max_microbatches=3)
    ),
    with_transfers=st.booleans(),
    send=st.sampled_from(SENDS),
    data=st.data(),
)
def test_a_damaged_schedule_is_accepted_exactly_when_the_interpreter_runs_it(
    schedule: Schedule, with_transfers: bool, send: Sends, data: st.DataObject
) -> None:
    whole = lower(schedule) if with_transfers else schedule
    damaged = data.draw(damages(whole))
    assert accepted(damaged, send) == interpreted(damaged, send)


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


def from_text(text: str, rank_of_stage: list[int], microbatches: int, **flags: bool) -> Schedule:
    lines = [line.split() for line in text.strip().splitlines()]
    actions = [[Action.parse(word) for word in line] for line in lines]
    return Schedule(actions, rank_of_stage, microbatches, **flags)


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


def test_an_interleaved_schedule_lowers_to_one_that_runs_with_channels_of_no_capacity() -> None:
    interleaved = from_text(
        """
        0F0 0F1 2F0 2F1 0F2 0F3 2B0 2F2 2B1 2F3 0B0 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
        """,
        [0, 1, 0, 1],
        4,
    )
    lowered = lower(interleaved)
    verify(lowered, "rendezvous")
    assert interpreted(lowered, "rendezvous")


# Rank 0 sends 3F0 and 3F1 to rank 1, which takes them only after what rank 0 does behind them.
TWO_MESSAGES_MUST_WAIT = """
0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3SEND_F0 3SEND_F1 0F2 0SEND_F2 \
3RECV_F2 3F2 3SEND_F2
2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_F2 2F2 4RECV_F0 4F0 4RECV_F1 4F1 2SEND_F2 \
4RECV_F2 4F2
1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2
"""


def test_a_buffer_for_one_message_is_too_small_where_two_must_wait() -> None:
    stages = [0, 2, 1, 0, 1]
    schedule = from_text(TWO_MESSAGES_MUST_WAIT, stages, 3, forward_only=True, lowered=True)
    sends: tuple[Sends, ...] = ("rendezvous", 1, 2, "buffered")
    assert [accepted(schedule, send) for send in sends] == [False, False, True, True]
    assert [interpreted(schedule, send) for send in sends] == [False, False, True, True]
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, 1)
    assert str(caught.value) == (
        "deadlock with 1-message sends: rank 0 at 3SEND_F1 waits for the room that 4RECV_F0 of "
        "rank 1 makes; rank 1 at 2RECV_F2 waits for 1SEND_F2 of rank 2; rank 2 at 1RECV_F2 waits "
        "for 0SEND_F2 of rank 0"
    )


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
        ("0UNSHARD 0F0 0B0\n1F0 1B0", {}, "0UNSHARD on rank 0 .* not available yet"),
        ("0F0 0B0\n1F0 1B0", {"lowered": True}, "0SEND_F0 is missing on rank 0"),
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
        ("0REDUCE_GRAD", "", "0REDUCE_GRAD stands 0 times on rank 0, it must 1 times"),
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
