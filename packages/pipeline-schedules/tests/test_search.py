"""Searched schedules work, fit, and are as good as published ones and as the optimum."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    GENERATORS,
    Costs,
    Found,
    Memory,
    Schedule,
    ScheduleError,
    lower,
    peak_memory,
    search,
    simulate,
    v_shape,
    verify,
    zb_h1,
    zb_h2,
    zb_v,
)
from trainwright.pipeline_schedules.search import Objective
from trainwright.pipeline_schedules.testing.exhaustive import optimum

EIGHTHS = st.integers(1, 16).map(lambda number: number / 8)


def best_generated(
    ranks: int, microbatches: int, costs: Costs, limit: float | None, chunks: int = 1
) -> float:
    """The least makespan of the generators that fit, of the placement with so many chunks."""
    best = math.inf
    for generator in GENERATORS.values():
        if generator.chunks != chunks or generator.name == "forward-only":
            continue
        schedule = generator.make(ranks, microbatches)
        if limit is None or (peak_memory(schedule) <= limit).all():
            best = min(best, simulate(schedule, costs).makespan)
    return best


@given(data=st.data(), ranks=st.integers(1, 4), microbatches=st.integers(1, 6))
@settings(max_examples=10)
def test_whatever_is_found_works_within_its_memory_and_is_not_below_its_bound(
    data: st.DataObject, ranks: int, microbatches: int
) -> None:
    shape = data.draw(st.sampled_from([tuple(range(ranks)), v_shape(ranks)]))
    times = [data.draw(st.tuples(*[EIGHTHS] * len(shape))) for _ in range(3)]
    backward = data.draw(
        st.sampled_from([None, tuple(0.7 * i + w for _, i, w in zip(*times, strict=True))])
    )
    costs = Costs(*times, backward=backward, latency=data.draw(EIGHTHS) / 8)
    memory = Memory(input_to_weight=data.draw(st.sampled_from([0.3, 1.0])))
    limit = data.draw(st.sampled_from([None, 1.0, 1.3, 2.0])) and 2.0 * ranks
    objective: Objective = data.draw(st.sampled_from(["makespan", "span"]))
    found = search(
        shape, microbatches, costs, memory=memory, memory_limit=limit, objective=objective,
        budget=10_000,
    )  # fmt: skip
    verify(lower(found.schedule), memory=memory, memory_limit=limit)
    run = simulate(found.schedule, costs)
    assert found.value == (run.makespan if objective == "makespan" else run.span)
    assert found.bound <= found.value
    assert found.gap >= 0
    assert found.schedule.rank_of_stage == shape


@pytest.mark.parametrize("seed", range(12))
def test_small_searches_find_the_optimum_of_an_exhaustive_search(seed: int) -> None:
    draw = random.Random(seed)
    ranks, microbatches = draw.randint(2, 3), draw.randint(2, 4)
    times = [[draw.choice([0.5, 1, 1.5, 2]) for _ in range(ranks)] for _ in range(3)]
    latency, held = draw.choice([0, 0.25, 0.5]), draw.choice([0.3, 0.5, 1.0])
    limit = draw.choice([1.5, 2.0, 2.5, 3.0, 9.0])
    objective: Objective = draw.choice(["makespan", "span"])

    found = search(
        range(ranks), microbatches, Costs(*times, latency=latency),
        memory=Memory(input_to_weight=held), memory_limit=limit, objective=objective,
    )  # fmt: skip

    best = optimum(
        times, latency, microbatches, limit=limit, held=held, objective=objective,
        below=found.value,
    )  # fmt: skip
    assert found.value <= 1.05 * best
    assert found.bound <= best + 1e-9


PUBLISHED = [
    # Layers, ranks, microbatches, F, I, W and transfer in ms, hidden size, heads, limit in
    # microbatches of all ranks, bubble rate. Qi et al. (arXiv:2401.10241), tables 5 and 9; limits
    # between 1 and 2 from its figure 7, made again with the authors' script.
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 1.0, 0.1585),
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 1.25, 0.1067851),
    ("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 1.5, 0.0719166),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 4096, 32, 1.0, 0.1045),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 4096, 32, 1.5, 0.0362836),
    ("6.2B", 8, 32, 29.802, 29.428, 19.530, 0.577, 4096, 32, 2.0, 0.0022),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]} at {row[9]}p")
def test_bubbles_are_no_larger_than_published_at_each_memory_limit(row: tuple[float, ...]) -> None:
    _, ranks, microbatches, forward, backward, weight, hop, hidden, heads, part, rate = row
    # Per layer, sequence position and sample; the sequence has 1024 positions.
    memory = Memory(34 * hidden + 5 * heads * 1024, 32 * hidden)
    found = search(
        range(int(ranks)), int(microbatches), Costs(forward, backward, weight, latency=hop),
        memory=memory, memory_limit=int(part * ranks * memory.forward_to_input),  # type: ignore[operator]
        objective="span", budget=150_000,
    )  # fmt: skip
    assert 1 - microbatches * (forward + backward + weight) / found.value <= rate + 1e-4


def test_zb_v_with_measured_costs_wastes_no_more_than_published() -> None:
    # 6.2B on 16 ranks, 48 microbatches; Qi et al., table 8: 0.0697.
    costs = Costs(14.407, 14.38, 9.676, latency=1.61)
    memory = Memory(34 * 4096 + 5 * 32 * 1024, 32 * 4096)
    limit = 2 * 16 * (34 * 4096 + 5 * 32 * 1024)
    found = search(
        v_shape(16), 48, costs, memory=memory, memory_limit=limit, objective="span",
        budget=60_000,
    )  # fmt: skip
    assert 1 - 2 * 48 * (14.407 + 14.38 + 9.676) / found.value <= 0.0697 + 1e-4


def test_unequal_stages_are_scheduled_better_than_by_any_generator_or_optimally() -> None:
    draw = random.Random(5)
    beaten = proved = 0
    for _ in range(6):
        ranks = draw.randint(3, 6)
        microbatches = draw.randint(ranks, 2 * ranks)
        times = [[draw.uniform(0.8, 1.2) for _ in range(ranks)] for _ in range(3)]
        costs = Costs(*times, latency=draw.choice([0.0, 0.05, 0.1]))
        limit = ranks * draw.uniform(1.05, 1.6)
        found = search(range(ranks), microbatches, costs, memory_limit=limit, budget=80_000)
        generated = best_generated(ranks, microbatches, costs, limit)
        assert found.value <= generated
        beaten += found.value < generated * (1 - 1e-9)
        proved += found.value >= generated * (1 - 1e-9) and found.gap < 1e-6
    assert beaten >= 5
    assert beaten + proved == 6


def test_a_limit_between_two_generators_gives_a_bubble_between_theirs() -> None:
    few, many = (simulate(make(6, 18)).span for make in (zb_h1, zb_h2))
    found = search(range(6), 18, memory_limit=9, objective="span", budget=150_000)
    assert many < found.value < few


def test_more_memory_never_hurts_and_none_is_needed_beyond_zero_bubble() -> None:
    spans = [
        search(range(4), 8, memory_limit=n, objective="span", budget=100_000).value
        for n in (1, 2, 4, 5, 7)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[-1] == 24
    assert search(v_shape(4), 16, memory_limit=8, objective="span").value == 96


def test_generators_are_kept_where_nothing_beats_them() -> None:
    found = search(v_shape(3), 8, Costs(pair=1.5, backward=2.0), budget=20_000)
    assert found.schedule.name == "dualpipe-v"
    assert isinstance(found, Found)
    assert search(v_shape(4), 12, objective="span").value == simulate(zb_v(4, 12)).span


def test_backwards_stay_whole_where_that_is_cheaper() -> None:
    found = search(range(3), 6, Costs(backward=1.2), budget=50_000)
    assert found.value < search(range(3), 6, budget=50_000).value


def test_memory_in_fractions_that_sums_round_up_is_used_to_the_last() -> None:
    memory = Memory(0.1, 0.0366)
    found = search(range(3), 9, memory=memory, memory_limit=0.3, objective="span", budget=50_000)
    verify(found.schedule, memory=memory, memory_limit=0.3)
    whole = search(
        range(3), 9, memory=Memory(1, 0.366), memory_limit=3, objective="span", budget=50_000
    )
    assert found.value == whole.value


def test_the_bound_holds_for_generators_that_mix_whole_split_and_overlapped_backwards() -> None:
    costs = Costs(1.0, 1.0, 1.0, backward=1.6, pair=1.8)
    for ranks, microbatches in ((2, 8), (4, 20)):
        made = GENERATORS["dualpipe-v"].make(ranks, microbatches)
        found = search(v_shape(ranks), microbatches, costs, budget=10_000)
        assert found.bound < simulate(made, costs).makespan * (1 - 1e-6)
        assert found.value <= simulate(made, costs).makespan


def test_the_bound_holds_where_a_pair_is_shorter_than_its_backward() -> None:
    costs = Costs([1, 0, 0.5, 3], [1, 0, 1, 3], [3, 0.5, 1.5, 1], pair=2.0)
    found = search(v_shape(2), 7, costs, budget=5_000)
    assert found.bound <= found.value


def test_the_same_search_finds_the_same_schedule() -> None:
    costs = Costs([1.0, 1.2, 0.9, 1.1], 1.1, [0.8, 0.7, 0.9, 0.6], latency=0.1)
    one, two = (search(range(4), 9, costs, memory_limit=5.5, budget=60_000) for _ in range(2))
    assert one.schedule == two.schedule


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"rank_of_stage": []}, "rank_of_stage must name a rank"),
        ({"rank_of_stage": [0, 2]}, "gives no stage to rank 1"),
        ({"microbatches": 0}, "num_microbatches must be at least 1"),
        ({"costs": Costs(forward=[1.0, 2.0])}, "forward must be one number or one for each of 3"),
        ({"costs": Costs(0, 0, 0)}, "some action must cost time"),
        ({"objective": "time"}, "objective must be 'makespan' or 'span', got 'time'"),
        ({"memory_limit": [1.0]}, "memory_limit must be one number or one for each of 3 ranks"),
        ({"memory_limit": math.nan}, "memory_limit must be numbers"),
        ({"memory_limit": 0.5}, "no schedule holds no more than the memory limit"),
    ],
)
def test_what_cannot_be_searched_is_refused(arguments: dict[str, object], reason: str) -> None:
    given_arguments: dict[str, object] = {"rank_of_stage": range(3), "microbatches": 4}
    with pytest.raises(ScheduleError, match=reason):
        search(**(given_arguments | arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_the_bound_counts_a_wait_once_where_all_forwards_may_come_first(
    objective: Objective,
) -> None:
    times = [[0.25, 0.25, 2.0], [0.25, 0.25, 2.0], [0.25, 0.25, 0.25]]
    found = search(range(3), 2, Costs(*times), objective=objective)
    assert found.bound <= optimum(
        times, 0.0, 2, limit=9, held=1.0, objective=objective, below=math.inf
    )


def test_a_single_stage_needs_no_waiting() -> None:
    found = search([0], 3, Costs(1.0, 2.0, 0.5))
    assert found.value == found.bound == 10.5
    assert isinstance(found.schedule, Schedule)
