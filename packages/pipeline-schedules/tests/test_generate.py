"""The generators draw what their papers draw."""

from __future__ import annotations

import itertools
import random

import pytest

from trainwright.pipeline_schedules import (
    GENERATORS,
    Kind,
    Schedule,
    ScheduleError,
    breadth_first,
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    peak_activations,
    peak_memory,
    sequential,
    unpaired,
    verify,
    zb_h1,
    zb_h2,
    zb_v,
)
from trainwright.pipeline_schedules.generators import Generator
from trainwright.pipeline_schedules.testing import check_generator, most_held


def letters(schedule: Schedule, rank: int) -> str:
    """Kinds and microbatches of a rank; of a second chunk in small letters, as papers shade it."""
    chunk = {stage: number for number, stage in enumerate(schedule.stages_of(rank))}
    words = []
    for action in schedule.program(rank):
        word = "F" if action.kind == Kind.F_PAIRED else action.kind.name
        words.append(f"{word.lower() if chunk[action.stage] else word}{action.microbatch}")
    return " ".join(words)


def test_gpipe_runs_all_forwards_then_all_backwards_as_its_paper_draws_them() -> None:
    schedule = gpipe(4, 4, newest_first=True)
    drawn = "F0 F1 F2 F3 B3 B2 B1 B0"
    assert [letters(schedule, rank) for rank in range(4)] == [drawn] * 4


def test_gpipe_adds_gradients_oldest_first_by_default_as_megatron_draws_it() -> None:
    schedule = gpipe(4, 8)
    drawn = "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7"
    assert [letters(schedule, rank) for rank in range(4)] == [drawn] * 4


def test_1f1b_is_what_the_megatron_paper_draws_for_four_devices_and_eight_microbatches() -> None:
    schedule = one_f_one_b(4, 8)
    assert [letters(schedule, rank) for rank in range(4)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_interleaved_1f1b_is_what_the_megatron_paper_draws_below_it() -> None:
    schedule = interleaved_1f1b(4, 8, 2)
    assert [letters(schedule, rank) for rank in (0, 3)] == [
        "F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 b0 F7 b1 f4 b2 f5 b3 f6 B0 f7 B1 B2 B3 "
        "b4 b5 b6 b7 B4 B5 B6 B7",
        "F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 F4 B0 F5 B1 F6 B2 F7 B3 "
        "f4 b4 f5 b5 f6 b6 f7 b7 B4 B5 B6 B7",
    ]


def test_interleaved_1f1b_puts_a_remainder_into_its_first_groups() -> None:
    forwards = [word for word in letters(interleaved_1f1b(2, 5, 2), 0).split() if word[0] in "Ff"]
    assert " ".join(forwards) == "F0 F1 F2 f0 f1 f2 F3 F4 f3 f4"
    assert letters(interleaved_1f1b(2, 1, 2), 0) == "F0 f0 b0 B0"


def test_interleaved_1f1b_on_one_chunk_is_1f1b() -> None:
    for ranks, microbatches in itertools.product(range(1, 6), range(1, 8)):
        assert interleaved_1f1b(ranks, microbatches, 1) == one_f_one_b(ranks, microbatches)


def test_breadth_first_runs_every_microbatch_through_a_chunk_before_the_next_one() -> None:
    schedule = breadth_first(2, 3, 2)
    drawn = "F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2"
    assert [letters(schedule, rank) for rank in range(2)] == [drawn] * 2
    newest_first = breadth_first(2, 3, 2, newest_first=True)
    assert letters(newest_first, 1) == "F0 F1 F2 f0 f1 f2 b2 b1 b0 B2 B1 B0"


def test_zb_h1_lets_weight_gradients_wait_one_microbatch_more_on_every_stage() -> None:
    schedule = zb_h1(4, 8)
    assert letters(schedule, 0) == (
        "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7"
    )
    assert letters(schedule, 3) == (
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7"
    )


def test_zb_h2_runs_twice_as_many_forwards_ahead() -> None:
    schedule = zb_h2(4, 8)
    assert letters(schedule, 0) == (
        "F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7"
    )
    assert letters(schedule, 3) == (
        "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7"
    )


def test_zb_v_is_the_handcrafted_schedule_of_its_authors() -> None:
    schedule = zb_v(2, 4)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert letters(schedule, 0) == (
        "F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3"
    )
    assert letters(schedule, 1) == (
        "F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3"
    )


def test_dualpipe_v_pairs_forwards_of_one_chunk_with_backwards_of_the_other() -> None:
    schedule = dualpipe_v(2, 4)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert " ".join(str(action) for action in schedule.program(0)) == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F_PAIRED3 3B1 3F_PAIRED2 0B0 "
        "3B2 3F_PAIRED3 0B1 3B3 0I2 0W2 0I3 0W3"
    )
    assert letters(schedule, 1) == ("F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3")
    assert Kind.F_PAIRED not in unpaired(schedule).packed[:, 0]
    assert letters(unpaired(schedule), 0) == letters(schedule, 0)


def test_sequential_lets_one_microbatch_at_a_time_through_the_whole_pipeline() -> None:
    schedule = sequential(3, 2)
    assert [letters(schedule, rank) for rank in range(3)] == ["F0 B0 F1 B1"] * 3


@pytest.mark.parametrize("generate", [sequential, one_f_one_b])
def test_on_one_stage_it_is_plain_gradient_accumulation(generate: object) -> None:
    assert letters(generate(1, 3), 0) == "F0 B0 F1 B1 F2 B2"  # type: ignore[operator]


def test_forward_only_holds_forwards_and_nothing_else() -> None:
    schedule = forward_only(2, 3)
    assert schedule.forward_only
    assert [letters(schedule, rank) for rank in range(2)] == ["F0 F1 F2"] * 2


def sizes_of(
    generator: Generator, max_ranks: int, max_microbatches: int, max_chunks: int
) -> list[tuple[int, int, int]]:
    chunks = range(1, max_chunks + 1) if generator.chunks is None else [generator.chunks]
    return list(itertools.product(range(1, max_ranks + 1), range(1, max_microbatches + 1), chunks))


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_ranks_microbatches_and_chunks_of_any_number_give_a_schedule_that_works(name: str) -> None:
    small = sizes_of(GENERATORS[name], 3, 3, 2)
    # All of them: python -m tools.bench.pipeline --all
    large = random.Random(name).sample(sizes_of(GENERATORS[name], 16, 33, 4), 2)
    for sizes in [*small, *large]:
        check_generator(GENERATORS[name], *sizes)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_the_bound_on_what_a_rank_holds_is_reached(name: str) -> None:
    for sizes in sizes_of(GENERATORS[name], 4, 9, 3):
        peak = peak_memory(GENERATORS[name].make(*sizes)).max()
        assert peak == most_held(name, *sizes)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_1f1b_holds_no_more_microbatches_than_stages_that_follow(
    stages: int, microbatches: int
) -> None:
    schedule = one_f_one_b(stages, microbatches)
    verify(schedule)
    verify(lower(schedule), "rendezvous")
    for stage in range(stages):
        kinds = [action.kind for action in schedule.program(stage)]
        assert (kinds.count(Kind.F), kinds.count(Kind.B)) == (microbatches, microbatches)
    peaks = peak_activations(schedule).tolist()
    assert peaks == [min(microbatches, stages - stage) for stage in range(stages)]


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_the_actions_of_a_kind_come_in_the_order_of_the_microbatches(name: str) -> None:
    schedule = GENERATORS[name].make(5, 13)
    for rank in range(5):
        program = schedule.program(rank)
        for stage in schedule.stages_of(rank):
            for kinds in ((Kind.F, Kind.F_PAIRED), (Kind.B, Kind.I), (Kind.B, Kind.W)):
                mine = [action for action in program if action.stage == stage]
                numbers = [action.microbatch for action in mine if action.kind in kinds]
                assert numbers == sorted(numbers)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 1)])
def test_sizes_below_one_are_refused_by_name(name: str, sizes: tuple[int, int]) -> None:
    culprit = "microbatches" if sizes[1] < 1 else "stages|ranks"
    with pytest.raises(ScheduleError, match=f"({culprit}) must be at least 1, got {min(sizes)}"):
        GENERATORS[name].make(*sizes)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("sizes", [(2.0, 4), (2, 4.0)])
def test_sizes_that_are_no_whole_numbers_are_refused(name: str, sizes: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="must be a whole number, got"):
        GENERATORS[name].make(*sizes)


def test_numbers_of_chunks_that_a_generator_has_not_are_refused_with_those_that_have_any() -> None:
    with pytest.raises(ScheduleError) as caught:
        GENERATORS["zb-v"].make(4, 8, 3)
    assert str(caught.value) == (
        "zb-v has 2 chunks a rank, got chunks=3; generators with any number of them: "
        "interleaved-1f1b, breadth-first"
    )
    with pytest.raises(ScheduleError, match="gpipe has 1 chunk a rank, got chunks=2"):
        GENERATORS["gpipe"].make(4, 8, 2)
    with pytest.raises(ScheduleError, match="chunks must be at least 1, got 0"):
        GENERATORS["breadth-first"].make(4, 8, 0)
    assert GENERATORS["interleaved-1f1b"].make(2, 4) == interleaved_1f1b(2, 4, 2)
    assert all(generator.description for generator in GENERATORS.values())
