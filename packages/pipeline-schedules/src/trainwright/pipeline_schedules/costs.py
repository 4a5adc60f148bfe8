"""What actions and transfers cost."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import FORWARD_KINDS, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import PerStage, as_value, per_stage

_Numbers = float | tuple[float, ...]
_LARGEST = 1e290


@attrs.frozen
class Costs:
    """What actions cost, in any unit of time; each one number or one for each stage.

    A transfer between ranks takes ``latency + boundary_bytes / bandwidth`` from the end of an
    action until its result is on the other rank, forward and backward alike. Transfers overlap
    computation and do not wait for each other.

    Args:
        forward: F.
        input_gradient: I.
        weight_gradient: W.
        backward: B, the whole backward; None for the sum of I and W.
        pair: F_PAIRED and the backward below it together, by the stage of the forward; None for
            the sum of the two, without any overlap.
        latency: Of a transfer; one number or one for each boundary between stages (``stages - 1``).
        boundary_bytes: What crosses a boundary; one number or one for each.
        bandwidth: Bytes in a unit of time; one number or one for each boundary. It and
            ``boundary_bytes`` are given together.
        gather: GATHER, from when it may start until the weights are whole.
        reduce: REDUCE. Of a lowered schedule; both run beside the computation, on each rank one
            after the other in the order of its list.
    """

    forward: _Numbers = attrs.field(default=1.0, converter=as_value)
    input_gradient: _Numbers = attrs.field(default=1.0, converter=as_value)
    weight_gradient: _Numbers = attrs.field(default=1.0, converter=as_value)
    backward: _Numbers | None = attrs.field(
        default=None, converter=attrs.converters.optional(as_value)
    )
    latency: _Numbers = attrs.field(default=0.0, converter=as_value)
    gather: _Numbers = attrs.field(default=0.0, converter=as_value)
    reduce: _Numbers = attrs.field(default=0.0, converter=as_value)
    pair: _Numbers | None = attrs.field(default=None, converter=attrs.converters.optional(as_value))
    boundary_bytes: _Numbers | None = attrs.field(
        default=None, converter=attrs.converters.optional(as_value)
    )
    bandwidth: _Numbers | None = attrs.field(
        default=None, converter=attrs.converters.optional(as_value)
    )

    def __attrs_post_init__(self) -> None:
        if (self.boundary_bytes is None) != (self.bandwidth is None):
            raise ScheduleError(
                "boundary_bytes and bandwidth are given together, got "
                f"boundary_bytes={self.boundary_bytes} and bandwidth={self.bandwidth}"
            )

    def table(self, stages: int) -> NDArray[np.float64]:
        """Cost of each kind on each stage, float64 ``[kinds, stages]``; 0 for other kinds.

        The row of F_PAIRED holds that of F; see `pairs`.

        Raises:
            ScheduleError: Negative or infinite costs, or not one for each stage.
        """
        table = np.zeros((max(Kind) + 1, stages))
        table[list(FORWARD_KINDS)] = _times("forward", self.forward, stages)
        table[Kind.I] = _times("input_gradient", self.input_gradient, stages)
        table[Kind.W] = _times("weight_gradient", self.weight_gradient, stages)
        table[Kind.B] = table[Kind.I] + table[Kind.W]
        if self.backward is not None:
            table[Kind.B] = _times("backward", self.backward, stages)
        table[Kind.GATHER] = _times("gather", self.gather, stages)
        table[Kind.REDUCE] = _times("reduce", self.reduce, stages)
        return table

    def pairs(self, stages: int) -> NDArray[np.float64] | None:
        """Cost of a pair by the stage of its forward, ``[stages]``; None for both without overlap.

        Raises:
            ScheduleError: Negative or infinite costs, or not one for each stage.
        """
        return None if self.pair is None else _times("pair", self.pair, stages)

    def transfers(self, stages: int) -> NDArray[np.float64]:
        """Time that each boundary adds where its stages are on different ranks: ``[stages - 1]``.

        Raises:
            ScheduleError: Negative or infinite numbers, a bandwidth of 0, or not one for each.
        """
        if stages == 1:
            return np.zeros(0)
        delay = _times("latency", self.latency, stages - 1)
        if self.boundary_bytes is None or self.bandwidth is None:
            return delay
        num_bytes = per_stage("boundary_bytes", self.boundary_bytes, stages - 1)
        bandwidth = per_stage("bandwidth", self.bandwidth, stages - 1)
        if not (bandwidth > 0).all():
            raise ScheduleError(f"bandwidth must be positive, got {self.bandwidth}")
        with np.errstate(over="ignore"):
            times = (num_bytes / bandwidth).tolist()
        moving = _times("boundary_bytes / bandwidth", times, stages - 1)
        return delay + moving


def _times(name: str, value: PerStage, number: int) -> NDArray[np.float64]:
    """One time for each, so small that all of a schedule can be added up.

    Raises:
        ScheduleError: Negative, too large, or not as many as needed.
    """
    times = per_stage(name, value, number)
    if times.max(initial=0.0) > _LARGEST:
        raise ScheduleError(f"{name} must be at most {_LARGEST:g}, got {times.max():g}")
    return times


UNIT_COSTS = Costs()
"""F = I = W = 1, B = 2, a pair 3; transfers, gathers and reductions take no time."""
