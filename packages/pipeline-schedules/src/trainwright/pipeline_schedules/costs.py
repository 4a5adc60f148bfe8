"""What actions and transfers cost."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import FORWARD_KINDS, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import as_value, per_stage

_Numbers = float | tuple[float, ...]


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
        table[list(FORWARD_KINDS)] = per_stage("forward", self.forward, stages)
        table[Kind.I] = per_stage("input_gradient", self.input_gradient, stages)
        table[Kind.W] = per_stage("weight_gradient", self.weight_gradient, stages)
        table[Kind.B] = table[Kind.I] + table[Kind.W]
        if self.backward is not None:
            table[Kind.B] = per_stage("backward", self.backward, stages)
        table[Kind.GATHER] = per_stage("gather", self.gather, stages)
        table[Kind.REDUCE] = per_stage("reduce", self.reduce, stages)
        return table

    def pairs(self, stages: int) -> NDArray[np.float64] | None:
        """Cost of a pair by the stage of its forward, ``[stages]``; None for both without overlap.

        Raises:
            ScheduleError: Negative or infinite costs, or not one for each stage.
        """
        return None if self.pair is None else per_stage("pair", self.pair, stages)

    def transfers(self, stages: int) -> NDArray[np.float64]:
        """Time that each boundary adds where its stages are on different ranks: ``[stages - 1]``.

        Raises:
            ScheduleError: Negative or infinite numbers, a bandwidth of 0, or not one for each.
        """
        if stages == 1:
            return np.zeros(0)
        delay = per_stage("latency", self.latency, stages - 1)
        if self.boundary_bytes is None or self.bandwidth is None:
            return delay
        num_bytes = per_stage("boundary_bytes", self.boundary_bytes, stages - 1)
        bandwidth = per_stage("bandwidth", self.bandwidth, stages - 1)
        if not (bandwidth > 0).all():
            raise ScheduleError(f"bandwidth must be positive, got {self.bandwidth}")
        return delay + num_bytes / bandwidth


UNIT_COSTS = Costs()
"""F = I = W = 1, B = 2, a pair 3; transfers, gathers and reductions take no time."""
