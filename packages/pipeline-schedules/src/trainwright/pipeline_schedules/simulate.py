"""When everything happens, given what everything costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.conventions import wait_once_a_loop
from trainwright.pipeline_schedules.costs import UNIT_COSTS, Costs
from trainwright.pipeline_schedules.deadlock import explain
from trainwright.pipeline_schedules.dependencies import (
    Stuck,
    Waits,
    earliest_times,
    only_compute,
    rows_of_kinds,
    waits,
)
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import Memory, peak_activations, peak_memory
from trainwright.pipeline_schedules.moves import beside_computation
from trainwright.pipeline_schedules.pairs import as_blocks, pair_rows, share_blocks
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.verify import check_all_but_running, verify

Times = NDArray[np.float64]
"""One time for each row of the packed schedule, float64 ``[n]``, read-only."""


def _read_only(times: Times) -> Times:
    copy = np.array(times, dtype=np.float64)
    copy.flags.writeable = False
    return copy


_same_times = attrs.cmp_using(eq=np.array_equal)


@attrs.frozen(repr=False)
class Simulation:
    """A run of a schedule on a time axis: when each action starts and ends.

    Bubbles compare with the ideal: the work of the busiest rank without any waiting. A pair is one
    block; its time is shared out between its two rows, in proportion to what they cost alone.

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
    def span_bubble_fraction(self) -> float:
        """Time of the span above the ideal, over the span."""
        return (self.span - self.ideal) / self.span

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each stage the most microbatches held between F and the last gradient."""
        return tuple(peak_activations(self.schedule).tolist())

    def peak_memory(self, memory: Memory) -> tuple[float, ...]:
        """For each rank the most it holds of what ``memory`` counts, such as bytes; see there."""
        return tuple(peak_memory(self.schedule, memory).tolist())

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


def simulate(
    schedule: Schedule, costs: Costs = UNIT_COSTS, *, loops_wait_once: bool = False
) -> Simulation:
    """Run every action as early as its rank and what it needs allow.

    The tables of the zero-bubble paper (arXiv:2401.10241) print `Simulation.bubble_fraction` of
    1F1B, interleaved 1F1B and ZB-H1, and `Simulation.span_bubble_fraction` of ZB-H2; F, I and W
    are those of a stage (a chunk of c has a c-th), and ``latency`` is what they call T_comm. Their
    script lets only some microbatches wait where a loop closes; ``loops_wait_once`` does as well.

    Args:
        schedule: Any schedule that verifies; of a lowered one the computing actions are run, its
            transfers being what ``costs`` has for boundaries, and, where they cost time, its
            gathers and reductions beside them: a computation waits for the gather of its weights,
            and a gather or reduction for the computation that stands before it.
        costs: What actions cost.
        loops_wait_once: Where a loop over chunks closes, between the last rank and the first, let
            only the first of each ``ranks`` microbatches wait for what it needs from there: less
            than a run takes where ``latency`` counts.

    Raises:
        ScheduleError: The schedule does not verify, costs do not fit it or are all zero.
    """
    if schedule.lowered or loops_wait_once:
        verify(schedule, "buffered")
    else:
        # Whether it runs to its end shows below.
        check_all_but_running(schedule)
    computing = only_compute(schedule)
    table = costs.table(schedule.num_stages)
    rows = computing.packed
    durations = table[rows[:, 0], rows[:, 1]]
    if not durations.any():
        raise ScheduleError(f"some action must cost time, got {costs}")
    forwards = pair_rows(computing)
    lengths = durations[forwards] + durations[forwards + 1]
    of_pairs = costs.pairs(schedule.num_stages)
    if of_pairs is not None:
        lengths = of_pairs[rows[forwards, 1]]
    blocks = as_blocks(durations, forwards, lengths)
    needed = waits(computing, costs.transfers(schedule.num_stages))
    if loops_wait_once:
        needed = (wait_once_a_loop(computing, needed[0]), needed[1])
    starts, ends, moves = _run(schedule, computing, blocks, needed, table)
    share_blocks(starts, ends, forwards, durations)
    return Simulation(computing, starts, ends, moves)


def _run(
    schedule: Schedule,
    computing: Schedule,
    durations: Times,
    needed: Sequence[Waits],
    table: NDArray[np.float64],
) -> tuple[Times, Times, Simulation | None]:
    """Starts and ends of the computations, and a run of the moves beside them if they cost time."""
    offsets = computing.offsets
    moved = schedule.packed[rows_of_kinds(schedule.packed, (Kind.GATHER, Kind.REDUCE))]
    cost_of_moves = table[moved[:, 0], moved[:, 1]]
    lanes = None
    if cost_of_moves.any():
        lanes = beside_computation(schedule, computing, needed)
        durations = np.concatenate([durations, cost_of_moves])
        offsets, needed = lanes.offsets, lanes.waits
    times = earliest_times(offsets, durations, needed)
    if isinstance(times, Stuck):
        raise explain(schedule, needed, times, None)
    starts, ends = times
    if lanes is None:
        return starts, ends, None
    number = computing.num_actions
    moves = Simulation(lanes.moves, starts[number:], ends[number:])
    return starts[:number], ends[:number], moves
