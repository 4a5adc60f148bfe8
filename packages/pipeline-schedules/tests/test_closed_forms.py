"""Bubbles and memory of every generator are those of its closed form, exactly."""

from __future__ import annotations

import pytest

from trainwright.pipeline_schedules import (
    Costs,
    Memory,
    breadth_first,
    dualpipe_v,
    interleaved_1f1b,
    one_f_one_b,
    peak_memory,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)

RANKS = (1, 2, 3, 6)
COSTS = (Costs(), Costs(3, 5, 2))


@pytest.mark.parametrize("generate", [interleaved_1f1b, breadth_first])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_looping_over_chunks_divides_the_bubble_by_their_number(
    generate: object, chunks: int
) -> None:
    for ranks in RANKS:
        for microbatches in (ranks, 2 * ranks - 1, 3 * ranks, 3 * ranks + 2):
            schedule = generate(ranks, microbatches, chunks)  # type: ignore[operator]
            for costs in (Costs(), Costs(1, 2, 3)):
                run = simulate(schedule, costs)
                assert run.bubble == (ranks - 1) / (chunks * microbatches)
                assert run.bubble_fraction == (ranks - 1) / (chunks * microbatches + ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_interleaving_holds_more_than_1f1b_by_a_part_that_shrinks_with_the_chunks(
    ranks: int,
) -> None:
    # Megatron-LM, section 2.2 of arXiv:2205.05198: 1 + (p - 1) / (p v) of what 1F1B holds.
    for chunks in (2, 3):
        peak = peak_memory(interleaved_1f1b(ranks, 4 * ranks, chunks)).max()
        assert peak == chunks * ranks + ranks - 1


@pytest.mark.parametrize("costs", COSTS)
def test_zb_h1_has_a_bubble_of_f_plus_i_minus_w_per_extra_stage_at_the_memory_of_1f1b(
    costs: Costs,
) -> None:
    f, i, w = (float(costs.table(1)[kind, 0]) for kind in (0, 2, 3))
    for p in RANKS:
        for m in (p, p + 1, 3 * p):
            schedule = zb_h1(p, m)
            run = simulate(schedule, costs)
            assert run.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
            assert peak_memory(schedule).max() == peak_memory(one_f_one_b(p, m)).max() == p


def test_zb_h1_with_no_more_microbatches_than_stages_ends_with_one_weight_gradient() -> None:
    # Appendix of arXiv:2401.10241: (m + p - 1)(F + I) + W.
    for p in RANKS:
        for m in range(1, p + 1):
            assert simulate(zb_h1(p, m), Costs(3, 4, 2)).makespan == (m + p - 1) * 7 + 2


@pytest.mark.parametrize("costs", COSTS)
def test_zb_h2_has_a_span_of_f_plus_i_minus_twice_w_per_extra_stage_above_the_work(
    costs: Costs,
) -> None:
    f, i, w = (float(costs.table(1)[kind, 0]) for kind in (0, 2, 3))
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 4 * p):
            schedule = zb_h2(p, m)
            run = simulate(schedule, costs)
            assert run.span == m * (f + i + w) + (p - 1) * (f + i - 2 * w)
            assert costs != Costs() or run.makespan == run.span + p - 1
            assert peak_memory(schedule).tolist() == [2 * p - 1] * p


@pytest.mark.parametrize(("generate", "ahead"), [(zb_h1, 1), (zb_h2, 2)])
def test_zero_bubble_stages_hold_what_the_paper_says_of_activations_and_of_what_w_needs(
    generate: object, ahead: int
) -> None:
    for p in RANKS:
        schedule = generate(p, 4 * p)  # type: ignore[operator]
        held = peak_memory(schedule, Memory(forward_to_input=10, input_to_weight=3)).tolist()
        assert held == [(ahead * (p - 1 - s) + 1) * 10 + ahead * s * 3 for s in range(p)]


@pytest.mark.parametrize("unit", [1.0, 2.5])
def test_zb_v_leaves_no_rank_idle_between_its_first_and_last_action_at_the_memory_of_1f1b(
    unit: float,
) -> None:
    for p in RANKS:
        for m in (2 * p - 1, 2 * p, 4 * p):
            schedule = zb_v(p, m)
            run = simulate(schedule, Costs(unit, unit, unit))
            assert run.spans == (6 * m * unit,) * p
            assert run.makespan == (6 * m + p - 1) * unit
            assert peak_memory(schedule).tolist() == [2 * p] * p


def test_four_ranks_and_sixteen_microbatches_have_99_for_96_of_work_or_102_without_overlap() -> (
    None
):
    for schedule, makespan in ((zb_v(4, 16), 99), (dualpipe_v(4, 16), 102)):
        run = simulate(schedule)
        assert (run.ideal, run.makespan) == (96, makespan)
    half = simulate(zb_h2(4, 16), Costs(2, 2, 2))
    assert (half.ideal, half.span, half.makespan) == (96, 96, 102)


def test_dualpipe_v_pays_where_a_pair_takes_less_than_its_parts() -> None:
    for p in RANKS:
        for m in (2 * p, 2 * p + 1, 5 * p):
            schedule = dualpipe_v(p, m)
            assert simulate(schedule).makespan == 6 * m + (p - 1) * 2
            assert simulate(schedule).idle == ((p - 1) * 2,) * p
            assert peak_memory(schedule).max() == 2 * p + 1
    paired = Costs(pair=2.5)
    assert simulate(dualpipe_v(4, 16), paired).makespan < simulate(zb_v(4, 16), paired).makespan
