"""When everything happens, given what everything costs."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.dependencies import (
    Stuck,
    earliest_times,
    only_compute,
    rows_of_kinds,
    waits,
)
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import as_value, peak_activations, per_stage
from trainwright.pipeline_schedules.moves import beside_computation
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.verify import verify

Times = NDArray[np.float64]
"""One time for each row of the packed schedule, float64 ``[n]``, read-only."""


@attrs.frozen
class Costs:
    """What actions cost, in any unit of time; each one number or one for each stage.

    Args:
        forward: F.
        input_gradient: I.
        weight_gradient: W.
        backward: B, the whole backward; None for the sum of I and W.
        latency: Time from the end of an action until its result is on another rank; one number or
            one for each boundary between stages (``stages - 1``). Transfers overlap computation
            and do not wait for each other.
        gather: GATHER, from when it may start until the weights are whole.
        reduce: REDUCE. Of a lowered schedule; both run beside the computation, on each rank one
            after the other in the order of its list.
    """

    forward: float | tuple[float, ...] = attrs.field(default=1.0, converter=as_value)
    input_gradient: float | tuple[float, ...] = attrs.field(default=1.0, converter=as_value)
    weight_gradient: float | tuple[float, ...] = attrs.field(default=1.0, converter=as_value)
    backward: float | tuple[float, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(as_value)
    )
    latency: float | tuple[float, ...] = attrs.field(default=0.0, converter=as_value)
    gather: float | tuple[float, ...] = attrs.field(default=0.0, converter=as_value)
    reduce: float | tuple[float, ...] = attrs.field(default=0.0, converter=as_value)

    def table(self, stages: int) -> NDArray[np.float64]:
        """Cost of each kind on each stage, float64 ``[kinds, stages]``; 0 for other kinds.

        Raises:
            ScheduleError: Negative or infinite costs, or not one for each stage.
        """
        table = np.zeros((max(Kind) + 1, stages))
        table[Kind.F] = per_stage("forward", self.forward, stages)
        table[Kind.I] = per_stage("input_gradient", self.input_gradient, stages)
        table[Kind.W] = per_stage("weight_gradient", self.weight_gradient, stages)
        table[Kind.B] = table[Kind.I] + table[Kind.W]
        if self.backward is not None:
            table[Kind.B] = per_stage("backward", self.backward, stages)
        table[Kind.GATHER] = per_stage("gather", self.gather, stages)
        table[Kind.REDUCE] = per_stage("reduce", self.reduce, stages)
        return table


UNIT_COSTS = Costs()
"""F = I = W = 1, B = 2, transfers, gathers and reductions take no time."""


def _read_only(times: Times) -> Times:
    copy = np.array(times, dtype=np.float64)
    copy.flags.writeable = False
    return copy


_same_times = attrs.cmp_using(eq=np.array_equal)


@attrs.frozen(repr=False)
class Simulation:
    """A run of a schedule on a time axis: when each action starts and ends.

    Bubbles compare with the ideal: the work of the busiest rank without any waiting.

    Args:
        schedule: The computing actions.
        starts: Start of each row of ``schedule.packed``.
        ends: End of each row.
        moves: GATHERs and REDUCEs, which run beside the computing actions, as a run of their own;
            None where they cost nothing.
    """

    schedule: Schedule
    starts: Times = attrs.field(converter=_read_only, eq=_same_times, hash=False)
    ends: Times = attrs.field(converter=_read_only, eq=_same_times, hash=False)
    moves: Simulation | None = None

    @property
    def makespan(self) -> float:
        """From the first start of any rank to the last end of any rank, moves included."""
        bounds = self._bounds_of_ranks()
        return max(end for _, end in bounds) - min(start for start, _ in bounds)

    @property
    def spans(self) -> tuple[float, ...]:
        """For each rank the time from its first start to its last end, moves included."""
        return tuple(max(end - start, 0.0) for start, end in self._bounds_of_ranks())

    @property
    def span(self) -> float:
        """The longest of `spans`: what a step costs when steps follow each other without a wait."""
        return max(self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time in which it computes."""
        lengths = self.ends - self.starts
        return tuple(float(lengths[rows].sum()) for rows in self._rank_slices())

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank the part of the makespan in which it does not compute."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)

    @property
    def ideal(self) -> float:
        """The work of the busiest rank."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """Time of the makespan above the ideal, over the ideal: (p-1)/m for GPipe and 1F1B."""
        return (self.makespan - self.ideal) / self.ideal

    @property
    def bubble_fraction(self) -> float:
        """Time of the makespan above the ideal, over the makespan: (p-1)/(m+p-1)."""
        return (self.makespan - self.ideal) / self.makespan

    @property
    def span_bubble(self) -> float:
        """Time of the span above the ideal, over the ideal."""
        return (self.span - self.ideal) / self.ideal

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each stage the most microbatches held between F and the last gradient."""
        return tuple(peak_activations(self.schedule).tolist())

    def _bounds_of_ranks(self) -> list[tuple[float, float]]:
        """The first start and the last end of each rank; of an idle one infinity and 0."""
        bounds = [
            (float(self.starts[rows].min(initial=np.inf)), float(self.ends[rows].max(initial=0.0)))
            for rows in self._rank_slices()
        ]
        if self.moves is None:
            return bounds
        pairs = zip(bounds, self.moves._bounds_of_ranks(), strict=True)
        return [(min(one[0], other[0]), max(one[1], other[1])) for one, other in pairs]

    def _rank_slices(self) -> list[slice]:
        bounds = self.schedule.offsets.tolist()
        return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]

    def __repr__(self) -> str:
        label = self.schedule.name or "unnamed"
        return (
            f"<Simulation {label}: makespan {self.makespan:g}, span {self.span:g}, "
            f"bubble {self.bubble:.4f} over ideal, peak activations {max(self.peak_activations)}>"
        )


def simulate(schedule: Schedule, costs: Costs = UNIT_COSTS) -> Simulation:
    """Run every action as early as its rank and what it needs allow.

    Args:
        schedule: Any schedule that verifies; of a lowered one the computing actions are run, its
            transfers being what ``latency`` speaks of, and, where they cost time, its gathers and
            reductions beside them: a computation waits for the gather of its weights, and a gather
            or reduction for the computation that stands before it.
        costs: What actions cost.

    Raises:
        ScheduleError: The schedule does not verify, costs do not fit it or are all zero.
    """
    verify(schedule, "buffered")
    computing = only_compute(schedule)
    table = costs.table(schedule.num_stages)
    rows = computing.packed
    durations = table[rows[:, 0], rows[:, 1]]
    if not durations.any():
        raise ScheduleError(f"some action must cost time, got {costs}")
    latency = np.zeros(0)
    if schedule.num_stages > 1:
        latency = per_stage("latency", costs.latency, schedule.num_stages - 1)
    needed = waits(computing, latency)
    moved = schedule.packed[rows_of_kinds(schedule.packed, (Kind.GATHER, Kind.REDUCE))]
    if not table[moved[:, 0], moved[:, 1]].any():
        times = earliest_times(computing.offsets, durations, needed)
        assert not isinstance(times, Stuck), "a verified schedule runs to its end"
        return Simulation(computing, *times)
    lanes = beside_computation(schedule, computing, needed)
    durations = np.concatenate([durations, table[moved[:, 0], moved[:, 1]]])
    times = earliest_times(lanes.offsets, durations, lanes.waits)
    assert not isinstance(times, Stuck), "a verified schedule runs to its end"
    starts, ends = times
    moves = Simulation(lanes.moves, starts[len(rows) :], ends[len(rows) :])
    return Simulation(computing, starts[: len(rows)], ends[: len(rows)], moves)
