"""What happened when on which rank, of a simulated run or of a measured one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs

from trainwright.pipeline_schedules.actions import FORWARD_KINDS, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.simulate import Simulation, simulate

COMPUTATIONS = ("F", "I", "W", "B")
"""The operations that take a rank's time; everything else runs beside them."""


class Timed(Protocol):
    """One operation of a measured run, as the executor's timelines hold it."""

    @property
    def operation(self) -> str:
        """``F``, ``I``, ``W``, ``B``, ``SEND_F``, …."""
        ...

    @property
    def stage(self) -> int:
        """Its stage."""
        ...

    @property
    def microbatch(self) -> int:
        """Its microbatch, -1 for none."""
        ...

    @property
    def start_s(self) -> float:
        """Start in seconds."""
        ...

    @property
    def stop_s(self) -> float:
        """End in seconds."""
        ...


Timelines = Sequence[Sequence[Timed]]
"""For each rank what it did: the ``timeline`` of each rank's result of a step."""

Run = Schedule | Simulation | Timelines
"""What can be drawn: a schedule is simulated at F = I = W = 1, B = 2."""


@attrs.frozen
class Bar:
    """One operation on the time axis.

    Attributes:
        rank: Who ran it.
        operation: ``F``, ``I``, ``W``, ``B``, ``GATHER``, ….
        stage: Its stage.
        microbatch: Its microbatch, -1 for none.
        start: Start, in the unit of the run.
        stop: End.
    """

    rank: int
    operation: str
    stage: int
    microbatch: int
    start: float
    stop: float

    @property
    def computes(self) -> bool:
        """Whether it takes the rank's time."""
        return self.operation in COMPUTATIONS

    @property
    def label(self) -> str:
        """What it is called in PyTorch's notation: ``0F3``."""
        number = "" if self.microbatch < 0 else str(self.microbatch)
        return f"{self.stage}{self.operation}{number}"


def bars_of(run: Run) -> list[Bar]:
    """Every operation of a run, rank after rank, with times from 0 on.

    Raises:
        ScheduleError: The schedule does not verify, or the run is empty.
    """
    simulation = simulate(run) if isinstance(run, Schedule) else run
    if isinstance(simulation, Simulation):
        bars = list(_simulated(simulation))
    else:
        bars = [_measured(rank, one) for rank, line in enumerate(simulation) for one in line]
    if not bars:
        raise ScheduleError("the run holds no operations, so that there is nothing to draw")
    begin = min(bar.start for bar in bars)
    return [attrs.evolve(bar, start=bar.start - begin, stop=bar.stop - begin) for bar in bars]


def headline(simulation: Simulation) -> str:
    """What a simulated run is, in one line."""
    schedule = simulation.schedule
    return (
        f"{schedule.name or 'schedule'}: {schedule.num_stages} stages on {schedule.num_ranks} "
        f"ranks, {schedule.num_microbatches} microbatches, makespan {simulation.makespan:g}, "
        f"bubble {simulation.bubble:.1%} over ideal"
    )


def _simulated(simulation: Simulation) -> Iterator[Bar]:
    runs = [simulation] if simulation.moves is None else [simulation, simulation.moves]
    for run in runs:
        times = zip(run.starts.tolist(), run.ends.tolist(), strict=True)
        for (rank, action), (start, stop) in zip(run.schedule, times, strict=True):
            kind = Kind.F if action.kind in FORWARD_KINDS else action.kind
            yield Bar(rank, kind.name, action.stage, action.microbatch, start, stop)


def _measured(rank: int, one: Timed) -> Bar:
    return Bar(rank, one.operation, one.stage, one.microbatch, one.start_s, one.stop_s)
