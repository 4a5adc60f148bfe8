"""Simulated times are those of the closed forms, exactly."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Action,
    Costs,
    Kind,
    Memory,
    Schedule,
    ScheduleError,
    Simulation,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    peak_activations,
    peak_memory,
    sequential,
    simulate,
)
from trainwright.pipeline_schedules.testing import from_text, valid_schedules

SIZES = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 7, 12)]


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    ("costs", "both"),
    [(Costs(), 3), (Costs(3, 5, 7), 15), (Costs(backward=1), 2), (Costs(1, 0, 0), 1)],
)
def test_gpipe_and_1f1b_waste_one_forward_and_backward_per_extra_stage(
    generate: object, costs: Costs, both: int
) -> None:
    for stages, microbatches in SIZES:
        run = simulate(generate(stages, microbatches), costs)  # type: ignore[operator]
        assert run.makespan == (microbatches + stages - 1) * both
        assert run.span == run.makespan
        assert run.ideal == microbatches * both
        assert run.bubble == (stages - 1) / microbatches
        assert run.span_bubble == run.bubble
        assert run.bubble_fraction == (stages - 1) / (microbatches + stages - 1)
        assert run.idle == ((stages - 1) * both,) * stages


@pytest.mark.parametrize("stages", range(1, 9))
def test_one_microbatch_through_layers_on_devices_wastes_all_devices_but_one(stages: int) -> None:
    assert simulate(sequential(stages, 1)).bubble == stages - 1
    assert simulate(sequential(stages, 5)).bubble == stages - 1
    assert simulate(sequential(stages, 5)).makespan == 15 * stages


def test_gpipe_holds_all_microbatches_and_1f1b_at_most_the_stages_that_follow() -> None:
    for stages, microbatches in SIZES:
        in_flight = tuple(min(microbatches, stages - stage) for stage in range(stages))
        assert simulate(one_f_one_b(stages, microbatches)).peak_activations == in_flight
        assert simulate(gpipe(stages, microbatches)).peak_activations == (microbatches,) * stages
        assert simulate(sequential(stages, microbatches)).peak_activations == (1,) * stages


def test_the_first_stage_computes_longer_than_its_neighbours_when_it_costs_more() -> None:
    run = simulate(gpipe(2, 2), Costs(forward=[3, 1], backward=[2, 2]))
    assert run.starts.tolist() == [0, 3, 9, 11, 3, 6, 7, 9]
    assert run.ends.tolist() == [3, 6, 11, 13, 4, 7, 9, 11]
    assert run.busy == (10, 6)
    assert run.idle == (3, 7)
    assert (run.makespan, run.spans, run.span) == (13, (13, 8), 13)
    assert run.bubble == pytest.approx(0.3)


def test_latency_delays_what_crosses_ranks_and_nothing_else() -> None:
    run = simulate(gpipe(3, 1), Costs(latency=(0.5, 2)))
    assert run.starts.tolist() == [0, 12, 1.5, 9.5, 4.5, 5.5]
    both = [Action(Kind.F, 0, 0), Action(Kind.F, 1, 0), Action(Kind.B, 1, 0), Action(Kind.B, 0, 0)]
    assert simulate(Schedule([both], [0, 0], 1), Costs(latency=9)).makespan == 6


def test_transfers_take_their_bytes_over_the_bandwidth_beside_the_latency() -> None:
    by_bytes = Costs(latency=0.5, boundary_bytes=(30, 10), bandwidth=(20, 40))
    assert simulate(gpipe(3, 2), by_bytes) == simulate(gpipe(3, 2), Costs(latency=(2, 0.75)))
    both = [Action(Kind.F, 0, 0), Action(Kind.F, 1, 0), Action(Kind.B, 1, 0), Action(Kind.B, 0, 0)]
    alone = simulate(Schedule([both], [0, 0], 1), Costs(boundary_bytes=1e9, bandwidth=1))
    assert alone.makespan == 6
    assert simulate(gpipe(1, 2), Costs(boundary_bytes=1e9, bandwidth=1)).makespan == 6


def test_a_pair_is_one_block_that_its_two_rows_share() -> None:
    # The pair waits for 1B0, although its forward could start at 4, and 1F1 waits for its end.
    text = "0F0 0F_PAIRED1 0B0 0B1\n1F0 1B0 1F1 1B1"
    schedule = from_text(text, [0, 1], 2)
    run = simulate(schedule, Costs(2, 1, 2, pair=4))
    assert run.starts.tolist() == [0, 7, 8.6, 16, 2, 4, 11, 13]
    assert run.ends.tolist() == [2, 8.6, 11, 19, 4, 7, 13, 16]
    assert run.busy == (9, 10)
    assert simulate(schedule, Costs(2, 1, 2)).makespan == 20
    assert run.peak_activations == (2, 1)
    assert run.peak_memory(Memory((3, 5))) == (6, 5)


def test_split_backwards_let_the_stage_before_go_on_sooner() -> None:
    first = [Action(Kind.F, 0, 0), Action(Kind.I, 0, 0), Action(Kind.W, 0, 0)]
    last = [Action(Kind.F, 1, 0), Action(Kind.I, 1, 0), Action(Kind.W, 1, 0)]
    run = simulate(Schedule([first, last], [0, 1], 1), Costs(1, 2, 4))
    assert run.starts.tolist() == [0, 4, 6, 1, 2, 4]
    assert run.makespan == 10
    assert run.peak_activations == (1, 1)


FORWARDS = (Kind.F, Kind.F_PAIRED)


def blocks_of(schedule: Schedule) -> list[list[int]]:
    """Row numbers of what runs at once: of each action, or of a pair."""
    blocks: list[list[int]] = []
    before = None
    for row, (_, action) in enumerate(schedule):
        if before == Kind.F_PAIRED:
            blocks[-1].append(row)
        else:
            blocks.append([row])
        before = action.kind
    return blocks


@given(
    schedule=valid_schedules(overlaps=True),
    costs=st.sampled_from([Costs(), Costs(1, 2, 3, latency=2), Costs(2, 1, 1, pair=3, latency=1)]),
)
def test_nothing_starts_before_its_rank_is_free_or_what_it_needs_is_there(
    schedule: Schedule, costs: Costs
) -> None:
    run = simulate(schedule, costs)
    owner, hop = schedule.rank_of_stage, float(np.max(costs.latency))
    table = costs.table(schedule.num_stages)
    blocks, actions = blocks_of(schedule), list(schedule)
    done = {
        (actions[row][1].kind in FORWARDS, actions[row][1].stage, actions[row][1].microbatch): (
            run.ends[block[-1]]
        )
        for block in blocks
        for row in block
        if actions[row][1].kind != Kind.W
    }
    free = dict.fromkeys(range(schedule.num_ranks), 0.0)
    for block in blocks:
        rank, first = actions[block[0]]
        earliest, length = [free[rank]], 0.0
        for row in block:
            kind, s, i = actions[row][1].kind, actions[row][1].stage, actions[row][1].microbatch
            length += table[kind, s]
            if kind in FORWARDS and s > 0:
                earliest.append(done[True, s - 1, i] + hop * (owner[s - 1] != rank))
            if kind in (Kind.B, Kind.I):
                earliest.append(done[True, s, i])
            if kind in (Kind.B, Kind.I) and s + 1 < len(owner):
                earliest.append(done[False, s + 1, i] + hop * (owner[s + 1] != rank))
            if kind == Kind.W:
                earliest.append(done[False, s, i])
        if first.kind == Kind.F_PAIRED and costs.pair is not None:
            length = float(costs.pair)  # type: ignore[arg-type]
        assert run.starts[block[0]] == max(earliest)
        assert run.ends[block[-1]] == run.starts[block[0]] + length
        assert run.ends[block[0]] == run.starts[block[-1]] or len(block) == 1
        free[rank] = run.ends[block[-1]]


@given(schedule=valid_schedules())
def test_a_lowered_schedule_is_simulated_by_what_it_computes(schedule: Schedule) -> None:
    assert simulate(lower(schedule)) == simulate(schedule)


def test_simulations_are_read_only_values() -> None:
    run = simulate(one_f_one_b(3, 4))
    assert run == simulate(one_f_one_b(3, 4))
    assert hash(run) == hash(simulate(one_f_one_b(3, 4)))
    assert run != simulate(one_f_one_b(3, 4), Costs(2))
    assert repr(run) == (
        "<Simulation 1f1b: makespan 18, span 18, bubble 0.5000 over ideal, peak activations 3>"
    )
    with pytest.raises(ValueError, match="read-only"):
        run.starts[0] = 1


def test_measured_times_make_a_run_like_simulated_ones() -> None:
    run = Simulation(forward_only(2, 1), [5.0, 7.0], [6.0, 7.5])
    assert (run.makespan, run.spans, run.busy) == (2.5, (1.0, 0.5), (1.0, 0.5))


def test_memory_counts_what_is_held_before_and_after_the_input_gradient() -> None:
    program = [
        Action.parse(f"0{word}") for word in ("F0", "F1", "I0", "I1", "W0", "W1", "F2", "B2")
    ]
    schedule = Schedule([program], [0], 3)
    assert peak_activations(schedule).tolist() == [2]
    assert peak_memory(schedule).tolist() == [2]
    assert peak_memory(schedule, Memory(10, 3)).tolist() == [20]
    assert peak_memory(schedule, Memory(2, 7)).tolist() == [14]
    assert peak_memory(one_f_one_b(3, 4), Memory((1, 10, 100))).tolist() == [3, 20, 100]
    words = ("F0", "I0", "F1", "I1", "W0", "W1")
    waiting = Schedule([[Action.parse(f"0{word}") for word in words]], [0], 2)
    assert peak_activations(waiting).tolist() == [2]
    several = Schedule([[Action(Kind.F, 0, 0), Action(Kind.F, 1, 0)]], [0, 0], 1)
    assert peak_memory(several, Memory([1, 10])).tolist() == [11]
    assert peak_activations(several).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        (Costs(forward=(1, 2)), "forward must be one number or one for each of 3 stages"),
        (Costs(weight_gradient=-1), "weight_gradient must be finite and not negative"),
        (Costs(input_gradient=float("nan")), "input_gradient must be finite"),
        (Costs(backward=float("inf")), "backward must be finite"),
        (Costs(latency=(1, 2, 3)), "latency must be one number or one for each of 2"),
        (Costs(pair=(1, 2)), "pair must be one number or one for each of 3 stages"),
        (Costs(boundary_bytes=1, bandwidth=(1, 0)), "bandwidth must be positive"),
        (Costs(boundary_bytes=(1,), bandwidth=1), "boundary_bytes must be one number or one"),
        (Costs(0, 0, 0), "some action must cost time"),
    ],
)
def test_costs_that_fit_no_schedule_are_refused_by_name(costs: Costs, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        simulate(gpipe(3, 2), costs)


@pytest.mark.parametrize("one", [{"boundary_bytes": 1}, {"bandwidth": 1}])
def test_bytes_without_a_bandwidth_and_a_bandwidth_without_bytes_are_refused(
    one: dict[str, float],
) -> None:
    with pytest.raises(ScheduleError, match="boundary_bytes and bandwidth are given together"):
        Costs(**one)


def test_a_schedule_whose_ranks_wait_in_a_circle_is_neither_simulated_nor_lowered() -> None:
    schedule = from_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", [0, 1], 2)
    for use in (simulate, lower):
        with pytest.raises(ScheduleError) as caught:
            use(schedule)  # type: ignore[operator]
        assert str(caught.value) == (
            "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0"
        )


def test_a_schedule_that_does_not_work_is_not_simulated() -> None:
    with pytest.raises(ScheduleError, match="missing"):
        simulate(attrs.evolve(forward_only(2, 2), forward_only=False))
