"""Which layers a stage gets."""

from __future__ import annotations

from typing import SupportsIndex

from trainwright.pipeline_schedules.errors import ScheduleError


def split_layers(num_layers: int, stages: int) -> list[range]:
    """Cut layers into stages of equal length, the first ones a layer longer where it must be.

    38 layers on 8 stages are 5, 5, 5, 5, 5, 5, 4, 4. Every layer is in exactly one stage and
    lengths differ by at most one.

    Args:
        num_layers: Layers of the model, at least as many as stages.
        stages: Stages of the model; with several chunks a rank, all chunks of all ranks.

    Returns:
        The global layer numbers of each stage.

    Raises:
        ScheduleError: No stages, fewer layers than stages, or no whole numbers.
    """
    for name, number in (("num_layers", num_layers), ("stages", stages)):
        if not isinstance(number, SupportsIndex):
            raise ScheduleError(f"{name} must be a whole number, got {number!r}")
    if stages < 1:
        raise ScheduleError(f"stages must be at least 1, got {stages}")
    if num_layers < stages:
        raise ScheduleError(
            f"{num_layers} layers cannot fill {stages} stages: every stage needs a layer; "
            f"use at most {num_layers} stages or at least {stages} layers"
        )
    length, longer = divmod(num_layers, stages)
    starts = [stage * length + min(stage, longer) for stage in range(stages + 1)]
    return [range(starts[stage], starts[stage + 1]) for stage in range(stages)]
