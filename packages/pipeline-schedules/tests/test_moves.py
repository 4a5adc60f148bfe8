"""Gathers and reductions in simulated time: beside the computation, one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    WeightPlan,
    draw,
    gpipe,
    lower,
    one_f_one_b,
    simulate,
)
from trainwright.pipeline_schedules.actions import COMPUTE_KINDS
from trainwright.pipeline_schedules.testing import from_text, valid_schedules, weight_plans


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("m", [1, 2, 6])
def test_gathered_once_a_step_costs_one_gather_more_and_reduced_once_one_reduction(
    stages: int, m: int
) -> None:
    # Every rank gathers at once, before the first output reaches it; the first rank reduces last.
    lowered = lower(one_f_one_b(stages, m), WeightPlan())
    run = simulate(lowered, Costs(gather=0.5, reduce=2))
    assert run.makespan == 0.5 + 3 * (m + stages - 1) + 2
    assert run.ideal == 3 * m
    assert run.moves is not None
    assert run.moves.busy == (2.5,) * stages


@pytest.mark.parametrize("m", [1, 3])
def test_gathered_for_every_action_nothing_overlaps_on_one_rank(m: int) -> None:
    lowered = lower(gpipe(1, m), WeightPlan(keep=0))
    assert simulate(lowered, Costs(gather=0.5)).makespan == 2 * m * 0.5 + 3 * m


def test_reductions_of_all_but_the_last_backward_hide_behind_the_next() -> None:
    each = WeightPlan(stages=(), reduce_each_backward=True)
    assert simulate(lower(gpipe(1, 4), each), Costs(reduce=2)).makespan == 4 + 4 * 2 + 2
    assert simulate(lower(gpipe(1, 4), each), Costs(reduce=3)).makespan == 4 + 2 + 4 * 3


def test_the_next_chunk_is_gathered_while_the_one_before_computes_where_there_is_room() -> None:
    schedule = from_text("0F0 1F0 2F0 2B0 1B0 0B0", [0, 0, 0], 1)
    costs = Costs(gather=1)
    assert simulate(lower(schedule, WeightPlan(keep=2)), costs).makespan == 1 + 9
    assert simulate(lower(schedule, WeightPlan(keep=1)), costs).makespan == 5 + 9


@given(
    schedule=valid_schedules(overlaps=True),
    plan=weight_plans(),
    costs=st.sampled_from([Costs(gather=1, reduce=3), Costs(gather=2, latency=1), Costs(reduce=1)]),
)
def test_moves_and_computations_start_when_what_stands_before_them_and_what_they_need_is_done(
    schedule: Schedule, plan: WeightPlan, costs: Costs
) -> None:
    lowered = lower(schedule, plan)
    run = simulate(lowered, costs)
    if run.moves is None:
        assert run == simulate(schedule, costs)
        return
    computed = iter(zip(run.starts.tolist(), run.ends.tolist(), strict=True))
    moved = iter(zip(run.moves.starts.tolist(), run.moves.ends.tolist(), strict=True))
    for rank in range(schedule.num_ranks):
        free = lane = 0.0
        whole: dict[int, float] = {}
        for action in lowered.program(rank):
            if action.kind in (Kind.GATHER, Kind.REDUCE):
                start, end = next(moved)
                assert start == max(free, lane)
                lane = end
                if action.kind == Kind.GATHER:
                    whole[action.stage] = end
            elif action.kind in COMPUTE_KINDS:
                start, end = next(computed)
                reads = action.kind != Kind.W
                assert start >= max(free, whole.get(action.stage, 0.0) if reads else 0.0)
                free = end
    assert run.makespan >= simulate(schedule, costs).makespan


def test_gathers_and_reductions_are_drawn_on_a_line_of_their_own() -> None:
    run = simulate(lower(one_f_one_b(2, 1), WeightPlan()), Costs(gather=2, reduce=1))
    assert draw(run).splitlines()[1:] == [
        "rank 0 | .  .  F0 .  .  .  B0 =  .",
        "       | G0 =  .  .  .  .  .  .  R0",
        "rank 1 | .  .  .  F0 B0 =  .  .  .",
        "       | G1 =  .  .  .  .  R1 .  .",
        "F forward, B backward; below, of a stage, R reduction, G gather; the number is the "
        "microbatch; = goes on, . idle; a column is 1",
    ]


def test_moves_that_cost_nothing_leave_a_run_as_it_was() -> None:
    schedule = one_f_one_b(3, 2)
    assert simulate(lower(schedule, WeightPlan())) == simulate(schedule)
    assert simulate(schedule, Costs(gather=1)) == simulate(schedule)
    with pytest.raises(ScheduleError, match="gather must be finite and not negative"):
        simulate(schedule, Costs(gather=-1))
    with pytest.raises(ScheduleError, match="reduce must be one number or one for each of 3"):
        simulate(schedule, Costs(reduce=(1, 2)))


def test_measured_moves_count_in_the_span_of_their_rank() -> None:
    run = simulate(lower(one_f_one_b(2, 1), WeightPlan()), Costs(gather=(2, 1), reduce=(0, 4)))
    assert run.spans == (8, 10)
    assert run.busy == (3, 3)
    assert Action(Kind.GATHER, 0) in [action for _, action in run.moves.schedule]  # type: ignore[union-attr]
