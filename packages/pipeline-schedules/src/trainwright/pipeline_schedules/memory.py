"""What a rank holds: activations between F and the last gradient, and gathered weights."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import FORWARD_KINDS, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule

PerStage = float | Sequence[float]
"""One number for all stages, or one for each."""


def per_stage(name: str, value: PerStage, stages: int) -> NDArray[np.float64]:
    """One number for each stage, checked: as many as stages, finite, not negative.

    Raises:
        ScheduleError: It is not.
    """
    numbers = np.asarray(value, dtype=np.float64)
    if numbers.ndim > 1 or (numbers.ndim == 1 and len(numbers) != stages):
        raise ScheduleError(
            f"{name} must be one number or one for each of {stages} stages, "
            f"got {list(numbers.shape)}"
        )
    if not (np.isfinite(numbers).all() and (numbers >= 0).all()):
        raise ScheduleError(f"{name} must be finite and not negative, got {value}")
    return np.broadcast_to(numbers, (stages,))


def as_value(value: PerStage) -> float | tuple[float, ...]:
    """The same numbers as something that compares and hashes."""
    if isinstance(value, Sequence | np.ndarray):
        return tuple(float(number) for number in value)
    return float(value)


@attrs.frozen
class Memory:
    """What a stage holds, in any unit; by default 1 for a microbatch from F to the last gradient.

    Args:
        forward_to_input: Held from F until B, or until I.
        input_to_weight: Held from I until W.
        weights: Whole weights of the stage, held from GATHER until RELEASE, whatever the number of
            microbatches; in a lowered schedule of sharded weights.
    """

    forward_to_input: float | tuple[float, ...] = attrs.field(default=1.0, converter=as_value)
    input_to_weight: float | tuple[float, ...] = attrs.field(default=1.0, converter=as_value)
    weights: float | tuple[float, ...] = attrs.field(default=0.0, converter=as_value)


UNIT_MEMORY = Memory()
"""One for each microbatch from its F until its B or W."""


def peak_memory(schedule: Schedule, memory: Memory = UNIT_MEMORY) -> NDArray[np.float64]:
    """The most that each rank holds at any time: ``[ranks]``, in the unit of ``memory``."""
    peaks = np.zeros(schedule.num_ranks)
    first = per_stage("forward_to_input", memory.forward_to_input, schedule.num_stages)
    second = per_stage("input_to_weight", memory.input_to_weight, schedule.num_stages)
    change_of_kind = np.zeros((max(Kind) + 1, schedule.num_stages))
    change_of_kind[list(FORWARD_KINDS)] = first
    change_of_kind[Kind.B] = -first
    change_of_kind[Kind.I] = second - first
    change_of_kind[Kind.W] = -second
    weights = per_stage("weights", memory.weights, schedule.num_stages)
    change_of_kind[Kind.GATHER], change_of_kind[Kind.RELEASE] = weights, -weights
    for rank, rows in enumerate(schedule.actions):
        if len(rows):
            held = np.cumsum(change_of_kind[rows[:, 0], rows[:, 1]])
            peaks[rank] = max(0.0, held.max())
    return peaks


def peak_activations(schedule: Schedule) -> NDArray[np.int64]:
    """The most microbatches each stage holds between their F and their B or W: ``[stages]``."""
    rows = schedule.packed
    change_of_kind = np.zeros(max(Kind) + 1, dtype=np.int64)
    change_of_kind[list(FORWARD_KINDS)] = 1
    change_of_kind[[Kind.B, Kind.W]] = -1
    by_stage = rows[np.argsort(rows[:, 1], kind="stable")]
    bounds = np.searchsorted(by_stage[:, 1], np.arange(schedule.num_stages + 1))
    peaks = np.zeros(schedule.num_stages, dtype=np.int64)
    for stage in range(schedule.num_stages):
        kinds = by_stage[bounds[stage] : bounds[stage + 1], 0]
        peaks[stage] = np.cumsum(change_of_kind[kinds]).max(initial=0)
    return peaks
