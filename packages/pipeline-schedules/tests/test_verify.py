"""What `verify` accepts is what a second, plain interpreter runs to its end."""

from __future__ import annotations

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


class Interpreter:
    """Runs a schedule action by action; channels hold ``capacity`` messages, None for any."""

    def __init__(self, schedule: Schedule, capacity: int | None) -> None:
        self.schedule, self.capacity = schedule, capacity
        self.left = [deque(schedule.program(rank)) for rank in range(schedule.num_ranks)]
        self.done: Counter[Action] = Counter()
        self.channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)

    def crosses(self, stage: int) -> bool:
        """Whether the boundary below this stage lies between ranks and needs messages."""
        owner = self.schedule.rank_of_stage
        inside = 0 <= stage < len(owner) - 1
        return inside and self.schedule.lowered and owner[stage] != owner[stage + 1]

    def expected(self, stage: int, number: int) -> list[Action]:
        kinds = [F] + [Kind.SEND_F] * self.crosses(stage) + [Kind.RECV_F] * self.crosses(stage - 1)
        if not self.schedule.forward_only:
            kinds += [I, W] if self.done[Action(I, stage, number)] else [B]
            kinds += [Kind.SEND_B] * self.crosses(stage - 1) + [Kind.RECV_B] * self.crosses(stage)
        return [Action(kind, stage, number) for kind in kinds]

    def needs(self, action: Action) -> list[list[Action]]:
        """All of these, any one of each."""
        kind, s, i = action.kind, action.stage, action.microbatch
        numbers, last = range(self.schedule.num_microbatches), self.schedule.num_stages - 1
        backward = [Action(B, s, i), Action(I, s, i)]
        behind = [Action(B, s + 1, i), Action(I, s + 1, i)]
        if kind == F and s > 0:
            crossing = self.crosses(s - 1)
            return [[Action(Kind.RECV_F, s, i) if crossing else Action(F, s - 1, i)]]
        if kind in (B, I):
            arrival = [Action(Kind.RECV_B, s, i)] if self.crosses(s) else behind
            return [[Action(F, s, i)]] + ([arrival] if s < last else [])
        if kind == Kind.REDUCE:
            return [[Action(B, s, j), Action(W, s, j)] for j in numbers]
        return {W: [backward[1:]], Kind.SEND_F: [[Action(F, s, i)]], Kind.SEND_B: [backward]}.get(
            kind, []
        )

    def step(self, rank: int) -> bool:
        """Run this rank's next action if it can run now."""
        if not self.left[rank]:
            return False
        action = self.left[rank][0]
        if not all(any(self.done[one] for one in any_of) for any_of in self.needs(action)):
            return False
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            stage = action.stage + (1 if action.kind == Kind.SEND_F else -1)
            if not 0 <= stage < self.schedule.num_stages:
                return False
            peer = self.schedule.rank_of_stage[stage]
            message = Action(Kind(action.kind + 1), stage, action.microbatch)
            channel = self.channels[rank, peer]
            if self.capacity == 0:
                if not self.left[peer] or self.left[peer][0] != message:
                    return False
                self.done[self.left[peer].popleft()] += 1
            elif self.capacity is not None and len(channel) >= self.capacity:
                return False
            else:
                channel.append(message)
        elif action.kind in (Kind.RECV_F, Kind.RECV_B):
            stage = action.stage + (-1 if action.kind == Kind.RECV_F else 1)
            if self.capacity == 0 or not 0 <= stage < self.schedule.num_stages:
                return False
            channel = self.channels[self.schedule.rank_of_stage[stage], rank]
            if not channel or channel[0] != action:
                return False
            channel.popleft()
        self.done[self.left[rank].popleft()] += 1
        return True

    def works(self) -> bool:
        """Whether all ranks reach their end, having done what they must, once, where they must."""
        owner = self.schedule.rank_of_stage
        for rank, action in self.schedule:
            if not 0 <= action.stage < len(owner) or owner[action.stage] != rank:
                return False
        while any(self.step(rank) for rank in range(self.schedule.num_ranks)):
            pass
        stages, numbers = range(len(owner)), range(self.schedule.num_microbatches)
        wanted = Counter(a for s in stages for i in numbers for a in self.expected(s, i))
        if self.schedule.lowered and not self.schedule.forward_only:
            wanted.update(Action(Kind.REDUCE, stage) for stage in stages)
        return not any(self.left) and self.done == wanted


def accepted(schedule: Schedule, send: Sends) -> bool:
    try:
        verify(schedule, send)
    except ScheduleError:
        return False
    return True


def interpreted(schedule: Schedule, send: Sends) -> bool:
    capacity = {"rendezvous": 0, "buffered": None}.get(str(send), send)
    return Interpreter(schedule, capacity).works()  # type: ignore[arg-type]


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


def test_a_bounded_buffer_that_is_too_small_is_told_from_one_that_is_large_enough() -> None:
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 2RECV_F0 2F0 2RECV_F1 2F1 2RECV_F2 2F2\n"
    text += "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_F2 1F2 1SEND_F2"
    schedule = from_text(text, [0, 1, 0], 3, forward_only=True, lowered=True)
    assert [accepted(schedule, send) for send in ("rendezvous", 1, 2, 3, "buffered")] == [
        False, True, True, True, True,
    ]  # fmt: skip
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2 "
    text += "0REDUCE_GRAD\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 "
    text += "1SEND_B2 1REDUCE_GRAD"
    schedule = from_text(text, [0, 1], 3, lowered=True)
    assert [accepted(schedule, send) for send in ("rendezvous", 1)] == [False, True]


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
