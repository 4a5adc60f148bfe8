"""The generators draw what their papers draw."""

from __future__ import annotations

import pytest

from trainwright.pipeline_schedules import (
    Kind,
    Schedule,
    ScheduleError,
    forward_only,
    gpipe,
    one_f_one_b,
    peak_activations,
    sequential,
    verify,
)
from trainwright.pipeline_schedules.testing import GENERATORS


def letters(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.kind.name}{a.microbatch}" for a in schedule.program(rank))


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


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_number_of_stages_and_microbatches_gives_a_schedule_that_verifies(name: str) -> None:
    for stages in range(1, 9):
        for microbatches in range(1, 13):
            schedule = GENERATORS[name](stages, microbatches)
            verify(schedule)
            assert schedule.name == name
            assert (schedule.num_stages, schedule.num_ranks) == (stages, stages)
            assert schedule.num_microbatches == microbatches


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", range(1, 9))
def test_1f1b_holds_no_more_microbatches_than_stages_that_follow(
    stages: int, microbatches: int
) -> None:
    peaks = peak_activations(one_f_one_b(stages, microbatches)).tolist()
    assert peaks == [min(microbatches, stages - stage) for stage in range(stages)]


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_forwards_and_backwards_come_in_the_order_of_the_microbatches(name: str) -> None:
    schedule = GENERATORS[name](5, 7)
    for rank in range(5):
        program = schedule.program(rank)
        for kind in (Kind.F, Kind.B):
            numbers = [action.microbatch for action in program if action.kind == kind]
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize(("sizes", "culprit"), [((0, 4), "stages"), ((4, 0), "microbatches")])
def test_sizes_below_one_are_refused_by_name(
    name: str, sizes: tuple[int, int], culprit: str
) -> None:
    with pytest.raises(ScheduleError, match=f"{culprit} must be at least 1, got 0"):
        GENERATORS[name](*sizes)
