"""Gathers, releases and reductions of sharded weights: where they stand and how many there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Action,
    Kind,
    Memory,
    Schedule,
    ScheduleError,
    WeightPlan,
    WeightTraffic,
    dualpipe_v,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    peak_live,
    peak_memory,
    sequential,
    to_csv,
    unpaired,
    verify,
    weight_traffic,
)
from trainwright.pipeline_schedules.stays import stays_under
from trainwright.pipeline_schedules.testing import from_text, valid_schedules, weight_plans

STAYS = (Kind.GATHER, Kind.RELEASE)
READS = (Kind.F, Kind.B, Kind.I)

TWO_CHUNKS = """
0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1
1F0 3F0 3B0 1F1 3F1 3B1 1B0 1B1
"""


def two_chunks() -> Schedule:
    """Two chunks on each of two ranks, which change places at almost every action of rank 0."""
    return from_text(TWO_CHUNKS, [0, 1, 0, 1], 2)


def test_a_chunk_is_gathered_at_its_first_forward_and_released_after_its_last_backward() -> None:
    lowered = lower(one_f_one_b(2, 2), WeightPlan())
    assert str(lowered) == (
        "rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0RESHARD "
        "0REDUCE_GRAD\n"
        "rank 1: 1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RESHARD "
        "1REDUCE_GRAD"
    )
    assert str(lower(forward_only(1, 2), WeightPlan())) == "rank 0: 0UNSHARD 0F0 0F1 0RESHARD"


def test_where_every_backward_is_reduced_a_reduction_follows_each() -> None:
    lowered = lower(gpipe(1, 2), WeightPlan(reduce_each_backward=True))
    assert str(lowered) == ("rank 0: 0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0B1 0RESHARD 0REDUCE_GRAD")
    split = from_text("0F0 0F1 0I0 0I1 0W0 0W1", [0], 2)
    assert str(lower(split, WeightPlan(reduce_each_backward=True))) == (
        "rank 0: 0UNSHARD 0F0 0F1 0I0 0I1 0RESHARD 0W0 0REDUCE_GRAD 0W1 0REDUCE_GRAD"
    )


def test_a_chunk_is_gathered_while_the_action_before_its_first_runs_and_no_earlier() -> None:
    first, second = str(lower(two_chunks(), WeightPlan())).splitlines()
    assert first.startswith("rank 0: 0UNSHARD 2UNSHARD 0F0 0SEND_F0")
    assert second.startswith("rank 1: 1UNSHARD 1RECV_F0 3UNSHARD 1F0 1SEND_F0 3RECV_F0 3F0 ")


def test_with_one_chunk_at_a_time_it_makes_room_before_the_next_is_gathered() -> None:
    lowered = lower(two_chunks(), WeightPlan(keep=1))
    computed = [a for a in lowered.program(0) if a.kind in (*STAYS, *READS)]
    assert " ".join(map(str, computed)) == (
        "0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2RESHARD 0UNSHARD 0F1 0RESHARD 2UNSHARD 2F1 2B0 "
        "2RESHARD 0UNSHARD 0B0 0RESHARD 2UNSHARD 2B1 2RESHARD 0UNSHARD 0B1 0RESHARD"
    )
    # The gather then stands right behind the release, so that it overlaps the wait for an input.
    assert "0SEND_F0 0RESHARD 2UNSHARD 2RECV_F0 2F0" in str(lowered)


def read_blocks(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """For each rank the stages that each of its actions reads, a pair being one action."""
    ranks = []
    for rank in range(schedule.num_ranks):
        blocks: list[tuple[int, ...]] = []
        before = None
        for action in schedule.program(rank):
            if before == Kind.F_PAIRED:
                blocks[-1] = tuple({*blocks[-1], action.stage})
            elif action.kind != Kind.W:
                blocks.append((action.stage,))
            before = action.kind
        ranks.append(blocks)
    return ranks


@given(schedule=valid_schedules(overlaps=True), plan=weight_plans())
def test_a_lowered_schedule_follows_its_plan_and_else_does_what_it_did(
    schedule: Schedule, plan: WeightPlan
) -> None:
    lowered = lower(schedule, plan)

    verify(lowered, weights=plan)
    without = attrs.evolve(plan, stages=())
    for rows, plain in zip(lowered.actions, lower(schedule, without).actions, strict=True):
        assert np.array_equal(rows[~np.isin(rows[:, 0], STAYS)], plain)
    m = schedule.num_microbatches
    for stage, moved in enumerate(weight_traffic(lowered)):
        sharded = plan.stages is None or stage in plan.stages
        reads = sum(
            stage in block for block in read_blocks(schedule)[schedule.rank_of_stage[stage]]
        )
        allowed = {None: (1, 1), 0: (reads, reads)}.get(plan.keep, (1, reads))
        assert not sharded or allowed[0] <= moved.gathers <= allowed[1]
        assert sharded or moved.gathers == 0
        assert moved.reductions == (m if plan.reduce_each_backward else 1)
    if plan.keep is not None:
        at_once = max(len(block) for blocks in read_blocks(schedule) for block in blocks)
        assert peak_live(lowered).max() <= max(plan.keep, at_once)


@pytest.mark.parametrize("keep", [0, 1, 2, None])
def test_a_pair_of_two_chunks_has_both_gathered_whatever_the_room(keep: int | None) -> None:
    schedule, plan = dualpipe_v(2, 5), WeightPlan(keep=keep)
    lowered = lower(schedule, plan)
    verify(lowered, weights=plan)
    assert peak_live(lowered).tolist() == [2, 2]
    one_at_a_time = lower(unpaired(schedule), plan)
    assert peak_live(one_at_a_time).max() == (2 if keep is None else max(keep, 1))


def fewest_gathers(stages: Sequence[int], most: int) -> int:
    """Search all ways: while one run computes, the next one's stage is there too from two on."""
    runs = [stage for stage, _ in itertools.groupby(stages)]
    costs = {frozenset[int](): 0}
    for number, stage in enumerate(runs):
        needed = {stage, *(runs[number + 1 : number + 2] if most >= 2 else ())}
        following: dict[frozenset[int], int] = {}
        for live, cost in costs.items():
            rest = live - needed
            for size in range(min(len(rest), most - len(needed)) + 1):
                for kept in itertools.combinations(sorted(rest), size):
                    now = frozenset(needed.union(kept))
                    paid = cost + len(needed - live)
                    following[now] = min(paid, following.get(now, paid))
        costs = following
    return min(costs.values())


@settings(max_examples=40)
@given(
    order=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2)), min_size=1, max_size=12),
    keep=st.integers(1, 4),
)
@example(order=[(stage, 1) for stage in (0, 1, 2, 3, 0, 1)], keep=3)
def test_no_other_order_of_gathers_within_the_same_room_needs_fewer(
    order: list[tuple[int, int]], keep: int
) -> None:
    # What matters is the order of the reads, so these need not be a schedule that works.
    stages = [stage for stage, times in order for _ in range(times)]
    rows = [(Kind.F, stage, 0) for stage in stages]
    schedule = Schedule([rows], [0] * 5, 1)

    stays = stays_under(schedule, WeightPlan(keep=keep))

    assert len(stays) == fewest_gathers(stages, keep)
    for number in range(len(rows)):
        assert any(s.first <= number <= s.last and s.stage == stages[number] for s in stays)


@pytest.mark.parametrize("m", [1, 2, 5])
def test_traffic_is_that_of_the_published_formulas(m: int) -> None:
    phi, ranks = 1000, 4
    once, per_action = WeightPlan(), WeightPlan(keep=0)
    each = WeightPlan(reduce_each_backward=True)

    def moved(schedule: Schedule, plan: WeightPlan) -> set[float]:
        return {t.elements(phi, ranks) for t in weight_traffic(lower(schedule, plan))}

    ring = (ranks - 1) / ranks
    for make in (sequential, gpipe, one_f_one_b):
        assert moved(make(3, m), once) == {2 * phi * ring}
        assert moved(make(3, m), per_action) == {(2 * m * phi + phi) * ring}
        assert moved(make(3, m), each) == {(phi + m * phi) * ring}
        assert moved(make(3, m), WeightPlan(stages=())) == {phi * ring}
    assert weight_traffic(lower(forward_only(2, m), once)) == (WeightTraffic(1, 0),) * 2
    with pytest.raises(ScheduleError, match="lower it first"):
        weight_traffic(gpipe(1, m))


def programs(schedule: Schedule) -> list[list[Action]]:
    return [list(schedule.program(rank)) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize(
    "plan",
    [
        WeightPlan(),
        WeightPlan(keep=1),
        WeightPlan(keep=0, reduce_each_backward=True),
        WeightPlan(stages=(2, 3), reduce_each_backward=True),
    ],
)
def test_taking_away_or_doubling_any_gather_release_or_reduction_is_found(
    plan: WeightPlan,
) -> None:
    good = lower(two_chunks(), plan)
    for rank, index in itertools.product(range(2), range(60)):
        whole = programs(good)
        if index >= len(whole[rank]) or whole[rank][index].kind not in (*STAYS, Kind.REDUCE):
            continue
        action = whole[rank].pop(index)
        one_less = attrs.evolve(good, actions=whole)
        whole = programs(good)
        whole[rank].insert(index, action)
        one_more = attrs.evolve(good, actions=whole)
        for damaged in (one_less, one_more):
            with pytest.raises(ScheduleError) as caught:
                verify(damaged, weights=plan)
            assert f"on rank {rank}" in str(caught.value)
            named = str(caught.value).split()[0]
            assert Action.parse(named).stage == action.stage


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("0UNSHARD 0F0", "0F0 0UNSHARD", "0F0 on rank 0 reads weights that are not gathered"),
        ("0B1 0RESHARD", "0RESHARD 0B1", "0B1 on rank 0 reads weights that are not gathered"),
        ("0UNSHARD", "", "0F0 on rank 0 reads weights that are not gathered: it must stand"),
        ("0RESHARD", "", "0UNSHARD on rank 0 is never released: 0RESHARD must stand"),
        ("0UNSHARD", "0UNSHARD 0UNSHARD", "0UNSHARD on rank 0 gathers what is gathered already"),
        ("0RESHARD", "0RESHARD 0RESHARD", "0RESHARD on rank 0 releases what is not gathered"),
        ("0UNSHARD", "0RESHARD 0UNSHARD", "0RESHARD on rank 0 releases what is not gathered"),
        ("0RESHARD", "0RESHARD 0UNSHARD", "0UNSHARD on rank 0 is never released"),
        ("0B0 0REDUCE_GRAD", "0REDUCE_GRAD 0B0", "0REDUCE_GRAD stands before 0B0 on rank 0"),
        ("0REDUCE_GRAD 0B1", "0B1 0REDUCE_GRAD", "number 0 on rank 0 stands behind 0B1"),
        ("0REDUCE_GRAD", "", "0REDUCE_GRAD stands 0 times on rank 0, it must stand 1 times, or 2"),
    ],
)
def test_each_fault_of_weights_is_named_with_its_action_and_its_reason(
    old: str, new: str, reason: str
) -> None:
    text = "0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0B1 0RESHARD 0REDUCE_GRAD"
    verify(from_text(text, [0], 2, lowered=True))
    with pytest.raises(ScheduleError, match=reason):
        verify(from_text(text.replace(old, new), [0], 2, lowered=True))


@pytest.mark.parametrize(
    ("followed", "promised", "reason"),
    [
        (WeightPlan(stages=(0,)), WeightPlan(), "1UNSHARD stands 0 times .* must be gathered"),
        (WeightPlan(), WeightPlan(stages=(0,)), "1UNSHARD stands 1 times .* must not be gathered"),
        (WeightPlan(keep=0), WeightPlan(), "0UNSHARD stands 4 times .* promises 1"),
        (WeightPlan(), WeightPlan(keep=0), "0UNSHARD stands 1 times .* promises 4"),
        (WeightPlan(), WeightPlan(keep=1), "rank 0 has up to 2 chunks gathered at once, .* 1"),
        (
            WeightPlan(),
            WeightPlan(reduce_each_backward=True),
            "0REDUCE_GRAD stands 1 times on rank 0, the weight plan promises 2",
        ),
        (
            WeightPlan(reduce_each_backward=True),
            WeightPlan(),
            "0REDUCE_GRAD stands 2 times on rank 0, the weight plan promises 1",
        ),
    ],
)
def test_a_schedule_that_follows_another_plan_than_promised_is_refused(
    followed: WeightPlan, promised: WeightPlan, reason: str
) -> None:
    lowered = lower(two_chunks(), followed)
    verify(lowered)
    with pytest.raises(ScheduleError, match=reason):
        verify(lowered, weights=promised)


def test_plans_that_fit_no_schedule_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"numbers from 0, got \[-1, 2\]"):
        WeightPlan(stages=(2, -1))
    with pytest.raises(ScheduleError, match="keep must be None or a number of chunks"):
        WeightPlan(keep=-1)
    with pytest.raises(ScheduleError, match="names stage 2, but the schedule has stages 0 to 1"):
        lower(gpipe(2, 1), WeightPlan(stages=(2,)))
    with pytest.raises(ScheduleError, match="lowered already"):
        lower(lower(gpipe(2, 1)), WeightPlan())
    with pytest.raises(ScheduleError, match="lower it first"):
        verify(gpipe(2, 1), weights=WeightPlan())


def test_plans_and_what_follows_them_are_values() -> None:
    assert WeightPlan(stages={1, 0}) == WeightPlan(stages=[0, 1, 1])
    assert hash(WeightPlan(keep=2)) == hash(WeightPlan(keep=2))
    lowered = lower(gpipe(1, 1), WeightPlan())
    assert lowered == lower(gpipe(1, 1), WeightPlan(keep=1))
    assert lowered != lower(gpipe(1, 1))
    assert to_csv(lowered) == "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n"


def test_gathered_weights_count_as_memory_from_gather_to_release() -> None:
    schedule, memory = two_chunks(), Memory(forward_to_input=0.0, weights=(10, 1, 20, 2))
    plans = (WeightPlan(stages=()), WeightPlan(), WeightPlan(keep=1), WeightPlan(stages=(2,)))
    held = [peak_memory(lower(schedule, plan), memory).tolist() for plan in plans]
    assert held == [[0, 0], [30, 3], [20, 2], [20, 0]]
    verify(lower(schedule, WeightPlan(keep=1)), memory=memory, memory_limit=20)
    with pytest.raises(ScheduleError, match="rank 0 holds up to 30, its limit is 20"):
        verify(lower(schedule, WeightPlan()), memory=memory, memory_limit=20)
