"""What `verify` accepts is what a second, plain interpreter runs to its end."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    WeightPlan,
    interleaved_1f1b,
    lower,
    verify,
)
from trainwright.pipeline_schedules.testing import (
    damages,
    from_text,
    generated_schedules,
    valid_schedules,
    weight_plans,
)
from trainwright.pipeline_schedules.verify import Sends

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
PAIRED = Kind.F_PAIRED
SENDS: tuple[Sends, ...] = ("rendezvous", "buffered", 1, 2)


def apart(schedule: Schedule, s: int) -> bool:
    """Whether messages cross the boundary behind stage s."""
    owner = schedule.rank_of_stage
    return 0 <= s < len(owner) - 1 and schedule.lowered and owner[s] != owner[s + 1]


def rule(schedule: Schedule, action: Action) -> tuple[list[str], list[tuple[str, int]]]:
    """Facts that an action needs about its stage, and facts that it makes, of which stage."""
    s, last = action.stage, schedule.num_stages - 1
    after = [] if apart(schedule, s) else [("input", s + 1)]
    before = [] if apart(schedule, s - 1) else [("gradient", s - 1)]
    forward = ["input"], [("output", s), *([("gradient", s)] if s == last else after)]
    return {
        F: forward,
        PAIRED: forward,
        B: (["output", "gradient"], [("backward", s), ("weights", s), *before]),
        I: (["output", "gradient"], [("backward", s), ("half", s), *before]),
        W: (["half"], [("weights", s)]),
        Kind.SEND_F: (["output"], []),
        Kind.RECV_F: ([], [("input", s)]),
        Kind.SEND_B: (["backward"], []),
        Kind.RECV_B: ([], [("gradient", s)]),
    }[action.kind]


def stage_rule(action: Action, whole: set[int], done: int, wanted: int) -> bool:
    """Whether a stage's weights can be gathered or released, or its gradients reduced, now.

    ``done`` weight gradients of the stage are there, and ``wanted`` must be for its reduction.
    """
    if action.kind == Kind.GATHER:
        return action.stage not in whole
    if action.kind == Kind.RELEASE:
        return action.stage in whole
    return done == wanted


def runs_to_its_end(schedule: Schedule, capacity: int | None) -> bool:
    """Run a schedule fact by fact; a channel holds ``capacity`` messages, None for any number."""
    owner, m, last = schedule.rank_of_stage, schedule.num_microbatches, schedule.num_stages - 1
    left = [deque(schedule.program(rank)) for rank in range(schedule.num_ranks)]
    facts = {("input", 0, i) for i in range(m)}
    sharded = {a.stage for _, a in schedule if a.kind in (Kind.GATHER, Kind.RELEASE)}
    whole: set[int] = set()
    reductions = Counter(a.stage for _, a in schedule if a.kind == Kind.REDUCE)
    reduced: Counter[int] = Counter()
    channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)

    def step(rank: int) -> bool:
        if not left[rank]:
            return False
        a = left[rank][0]
        if a.kind in (Kind.GATHER, Kind.RELEASE, Kind.REDUCE):
            done = sum(("weights", a.stage, i) in facts for i in range(m))
            wanted = m if reductions[a.stage] == 1 else reduced[a.stage] + 1
            if not stage_rule(a, whole, done, wanted):
                return False
            whole.symmetric_difference_update([] if a.kind == Kind.REDUCE else [a.stage])
            reduced[a.stage] += a.kind == Kind.REDUCE
            left[rank].popleft()
            return True
        block = list(left[rank])[: 1 + (a.kind == PAIRED)]
        if a.kind == PAIRED and block[-1].kind not in (B, I):
            return False
        needed = [(fact, b.stage, b.microbatch) for b in block for fact in rule(schedule, b)[0]]
        if not facts.issuperset(needed):
            return False
        if any(b.kind in (F, PAIRED, B, I) and b.stage in sharded - whole for b in block):
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
        for b in block:
            facts.update((fact, stage, b.microbatch) for fact, stage in rule(schedule, b)[1])
            left[rank].popleft()
        return True

    while any(step(rank) for rank in range(schedule.num_ranks)):
        pass
    return not any(left) and not whole


def does_each_thing_once(schedule: Schedule) -> bool:
    """Count actions: each that must be there once is, on its rank, and no other."""
    owner, back = schedule.rank_of_stage, int(not schedule.forward_only)
    stages, numbers = range(schedule.num_stages), range(schedule.num_microbatches)
    if any(a.stage not in stages or owner[a.stage] != rank for rank, a in schedule):
        return False
    count = Counter(action for _, action in schedule)
    for s, i in itertools.product(stages, numbers):
        behind, before = apart(schedule, s), apart(schedule, s - 1)
        wanted = [1, back, count[Action(I, s, i)], behind, before, before * back, behind * back]
        counted = [
            count[Action(F, s, i)] + count[Action(PAIRED, s, i)],
            count[Action(B, s, i)] + count[Action(I, s, i)],
        ]
        kinds = (W, Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
        if counted + [count[Action(kind, s, i)] for kind in kinds] != wanted:
            return False
    stays = [a for a in count if a.kind in (Kind.GATHER, Kind.RELEASE)]
    reduced = {schedule.lowered * back, schedule.lowered * back * schedule.num_microbatches}
    right = all(count[Action(Kind.REDUCE, s)] in reduced for s in stages)
    return right and (schedule.lowered or not stays)


def accepted(schedule: Schedule, send: Sends) -> bool:
    try:
        verify(schedule, send)
    except ScheduleError:
        return False
    return True


def interpreted(schedule: Schedule, send: Sends) -> bool:
    capacity = {"rendezvous": 0, "buffered": None}.get(str(send), send)
    return does_each_thing_once(schedule) and runs_to_its_end(schedule, capacity)  # type: ignore[arg-type]


@given(
    schedule=st.one_of(generated_schedules(), valid_schedules(overlaps=True)),
    send=st.sampled_from(SENDS),
    plan=weight_plans(),
)
def test_valid_schedules_and_their_lowerings_work_with_every_kind_of_send(
    schedule: Schedule, send: Sends, plan: WeightPlan
) -> None:
    for one in (schedule, lower(schedule), lower(schedule, plan)):
        verify(one, send)
        assert interpreted(one, send)


@settings(max_examples=300)
@given(
    schedule=st.one_of(
        generated_schedules(max_ranks=4, max_microbatches=4, max_chunks=2),
        valid_schedules(max_microbatches=3, overlaps=True),
    ),
    plan=st.one_of(st.none(), weight_plans()),
    with_transfers=st.booleans(),
    send=st.sampled_from(SENDS),
    data=st.data(),
)
def test_a_damaged_schedule_is_accepted_exactly_when_the_interpreter_runs_it(
    schedule: Schedule,
    plan: WeightPlan | None,
    with_transfers: bool,
    send: Sends,
    data: st.DataObject,
) -> None:
    whole = lower(schedule, plan) if with_transfers else schedule
    damaged = data.draw(damages(whole))
    assert accepted(damaged, send) == interpreted(damaged, send)


def test_an_interleaved_schedule_lowers_to_one_that_runs_with_channels_of_no_capacity() -> None:
    lowered = lower(interleaved_1f1b(2, 4, 2))
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
