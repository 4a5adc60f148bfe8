"""How much of a step a rank waits: measured, and simulated with the costs that were measured.

A computation costs all that its rank does from its start until it waits or computes again, so that
what the host spends on messages is work and not a bubble; a bubble is waiting.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import attrs
import torch
import torch.distributed as dist

from tools.bench.pipeline.contestants import Job, Ours
from trainwright.collectives import Communicator
from trainwright.pipeline_schedules import Costs, simulate
from trainwright.pipeline_schedules.execute import Timed

_KINDS = ("F", "B", "I", "W")
_PINGS = 50
_Key = TypeVar("_Key", bound=Hashable)


@attrs.frozen
class Bubble:
    """The bubbles of one schedule, as parts of the makespan, by the busiest rank.

    Args:
        schedule: Its name.
        measured: By the median step.
        simulated: With ``costs``.
        costs: Seconds of each kind, the mean over stages, and of a transfer.
    """

    schedule: str
    measured: float
    simulated: float
    costs: dict[str, float]


def measure_bubbles(world: Communicator, jobs: list[Job], rounds: int) -> list[Bubble]:
    """Measure all schedules."""
    return [_measure(world, job, rounds) for job in jobs]


def _measure(world: Communicator, job: Job, rounds: int) -> Bubble:
    contestant = Ours(job, world)
    contestant.step()
    latency = _latency(world, job)
    durations: dict[tuple[str, int], list[float]] = defaultdict(list)
    shares = []
    for _ in range(rounds):
        for module in contestant.stages.values():
            module.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        result = contestant.executor.step(contestant.inputs, divisor=1.0, timed=True)
        # The step of the pipeline ends with that of its last rank.
        elapsed = time.perf_counter() - start
        assert result.timeline is not None
        busy = 0.0
        for operation, stage, seconds in _occupations(result.timeline):
            durations[operation, stage].append(seconds)
            busy += seconds
        makespan, busiest = _largest(elapsed, busy)
        shares.append(1 - busiest / makespan)
    costs = _gathered({key: statistics.median(values) for key, values in durations.items()})
    simulated = _simulated(job, costs, latency)
    means = {
        kind: statistics.mean(cost for (name, _), cost in costs.items() if name == kind)
        for kind in _KINDS
        if any(name == kind for name, _ in costs)
    }
    measured = statistics.median(shares)
    return Bubble(job.schedule, measured, simulated, {**means, "transfer": latency})


def _occupations(timeline: Sequence[Timed]) -> Iterator[tuple[str, int, float]]:
    """Each computation, its stage, and the time until the rank waits or computes again."""
    running: Timed | None = None
    for timed in timeline:
        if timed.operation in _KINDS or timed.operation.startswith("wait"):
            if running is not None:
                yield running.operation, running.stage, timed.start_s - running.start_s
            running = timed if timed.operation in _KINDS else None
    if running is not None:
        # What the rank does last is not followed by anything; the step may end with waiting sends.
        yield running.operation, running.stage, running.stop_s - running.start_s


def _simulated(job: Job, costs: dict[tuple[str, int], float], latency: float) -> float:
    schedule = job.make()
    stages = range(schedule.num_stages)

    def of(kind: str) -> tuple[float, ...]:
        return tuple(costs.get((kind, stage), 0.0) for stage in stages)

    splits = any(kind == "I" for kind, _ in costs)
    whole = any(kind == "B" for kind, _ in costs)
    return simulate(
        schedule,
        Costs(
            forward=of("F"),
            input_gradient=of("I") if splits else of("B"),
            weight_gradient=of("W") if splits else (0.0,) * schedule.num_stages,
            backward=of("B") if whole else None,
            latency=latency,
        ),
    ).bubble_fraction


def _latency(world: Communicator, job: Job) -> float:
    """Seconds from a send to the end of its receive, half of a round trip."""
    tensor = torch.zeros(job.rows, job.width)
    times = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        if world.rank == 0:
            world.send(tensor, 1, 7).wait()
            world.recv(tensor, 1, 8).wait()
        else:
            world.recv(tensor, 0, 7).wait()
            world.send(tensor, 0, 8).wait()
        times.append((time.perf_counter() - start) / 2)
    return _gathered({0: statistics.median(times)})[0]


def _largest(*values: float) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _gathered(own: dict[_Key, float]) -> dict[_Key, float]:
    parts: list[dict[_Key, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {key: value for part in reversed(parts) for key, value in part.items()}
