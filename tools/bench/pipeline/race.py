"""Steps in turn, of our executor and of PyTorch's runtime."""

from __future__ import annotations

import gc

import attrs
import torch
import torch.distributed as dist
from torch import nn

from tools.bench.pipeline.contestants import Contestant, Job, Ours, Theirs
from tools.bench.processes import time_steps
from tools.bench.rounds import interleave
from trainwright.collectives import Communicator


@attrs.frozen
class Race:
    """What one rank saw of one schedule.

    Args:
        schedule: Its name.
        error: The largest difference of a gradient of either from one process's, as a part of that
            gradient's largest element.
        ours: Seconds a step in each round.
        theirs: Likewise.
    """

    schedule: str
    error: float
    ours: list[float]
    theirs: list[float]


def run_race(world: Communicator, jobs: list[Job], rounds: int, steps: int) -> list[Race]:
    """Check and time all schedules."""
    return [_race(world, job, rounds, steps) for job in jobs]


def _race(world: Communicator, job: Job, rounds: int, steps: int) -> Race:
    contestants: dict[str, Contestant] = {"ours": Ours(job, world), "theirs": Theirs(job, world)}
    errors = []
    for contestant in contestants.values():
        contestant.step()
        errors.append(_error(job, contestant))
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), rounds):
        for name in order:
            seconds[name].append(time_steps(contestants[name].step, steps))
    worst = torch.tensor(max(errors), dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Race(job.schedule, float(worst), seconds["ours"], seconds["theirs"])


def _error(job: Job, contestant: Contestant) -> float:
    """The largest difference from one process."""
    num_stages = job.make().num_stages
    serial = job.stages(tuple(range(num_stages)), num_stages)
    x, target = job.data()
    output = nn.Sequential(*serial.values())(x)
    nn.MSELoss(reduction="sum")(output, target).backward()
    worst = 0.0
    for number, stage in contestant.stages.items():
        for seen, right in zip(stage.parameters(), serial[number].parameters(), strict=True):
            assert right.grad is not None
            if seen.grad is None:
                return float("inf")
            error = float((seen.grad - right.grad).abs().max() / right.grad.abs().max())
            worst = max(worst, error) if error == error else float("inf")
    return worst
