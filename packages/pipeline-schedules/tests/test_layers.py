"""Layers are cut into stages without loss."""

from __future__ import annotations

import pytest

from trainwright.pipeline_schedules import ScheduleError, split_layers


@pytest.mark.parametrize("stages", range(1, 25))
def test_every_layer_is_in_exactly_one_stage_and_lengths_differ_by_at_most_one(stages: int) -> None:
    for num_layers in range(stages, 65):
        parts = split_layers(num_layers, stages)
        lengths = [len(part) for part in parts]
        assert [layer for part in parts for layer in part] == list(range(num_layers))
        assert len(parts) == stages
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("num_layers", "stages", "lengths"),
    [(38, 8, [5, 5, 5, 5, 5, 5, 4, 4]), (10, 3, [4, 3, 3]), (30, 4, [8, 8, 7, 7]), (5, 5, [1] * 5)],
)
def test_the_first_stages_take_the_layers_that_are_over(
    num_layers: int, stages: int, lengths: list[int]
) -> None:
    assert [len(part) for part in split_layers(num_layers, stages)] == lengths


def test_fewer_layers_than_stages_are_refused_and_both_are_named() -> None:
    with pytest.raises(ScheduleError, match="3 layers cannot fill 4 stages"):
        split_layers(3, 4)
    with pytest.raises(ScheduleError, match="stages must be at least 1, got 0"):
        split_layers(3, 0)


@pytest.mark.parametrize(("num_layers", "stages"), [(4.0, 2), (4, 2.0), ("4", 2)])
def test_numbers_that_are_not_whole_are_refused(num_layers: object, stages: object) -> None:
    with pytest.raises(ScheduleError, match="must be a whole number"):
        split_layers(num_layers, stages)  # type: ignore[arg-type]
