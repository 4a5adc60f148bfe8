"""What the processes of a timed run do."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence

import attrs

from tools.bench.data_parallel.check import Agreement, check
from tools.bench.data_parallel.contestants import Contestant, Recipe, builders, take_step
from tools.bench.data_parallel.gpt import BATCHES, SHAPES, Batch
from tools.bench.data_parallel.worlds import GLOO, connect
from tools.bench.processes import time_steps
from tools.bench.rounds import interleave
from trainwright.collectives import Communicator
from trainwright.sharding import NotAvailableError

_NUM_BATCHES = 4
# DDP arranges its buckets anew after the first step.
_FIRST_STEPS = 2


@attrs.frozen
class Plan:
    """What to time.

    Args:
        model: name of the model's shape.
        names: the contestants.
        steps: steps a round, for each kind of batch.
        rounds: how often each contestant has its turn.
        comm: what carries the messages of the stages.
    """

    model: str
    names: tuple[str, ...]
    steps: Mapping[str, int]
    rounds: int
    comm: str = GLOO


@attrs.frozen
class Outcome:
    """What one rank saw.

    Args:
        agreements: how far each contestant's weights are from those of one process.
        missing: why a contestant is not available.
        seconds: by kind of batch and contestant, seconds a step in each round.
    """

    agreements: dict[str, Agreement]
    missing: dict[str, str]
    seconds: dict[str, dict[str, list[float]]]


def measure(world: Communicator, plan: Plan) -> Outcome:
    """Check all contestants, then time them in turn, all alive in the same processes."""
    world = connect(world, plan.comm)
    shape = SHAPES[plan.model]
    agreements, missing = check(world, shape, plan.names)
    if not all(agreement.holds for agreement in agreements.values()):
        return Outcome(agreements, missing, {})
    contestants: dict[str, Contestant] = {}
    for name in plan.names:
        try:
            contestants[name] = builders()[name](world, Recipe(shape))
        except NotAvailableError as error:
            missing[name] = str(error)
    # What lives from here on need not be searched for garbage in the middle of a step.
    gc.collect()
    gc.freeze()
    seconds = {}
    for kind, steps in plan.steps.items():
        seeds = [number * world.size + world.rank for number in range(_NUM_BATCHES)]
        batches = [Batch.draw(shape, BATCHES[kind], seed) for seed in seeds]
        seconds[kind] = _time_rounds(contestants, batches, steps, plan.rounds)
    return Outcome(agreements, missing, seconds)


def _time_rounds(
    contestants: Mapping[str, Contestant], batches: Sequence[Batch], steps: int, rounds: int
) -> dict[str, list[float]]:
    for contestant in contestants.values():
        for _ in range(_FIRST_STEPS):
            take_step(contestant, batches[0])
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), rounds):
        for name in order:
            seconds[name].append(_time_steps(contestants[name], batches, steps))
    return seconds


def _time_steps(contestant: Contestant, batches: Sequence[Batch], steps: int) -> float:
    turns = itertools.cycle(batches)
    return time_steps(lambda: take_step(contestant, next(turns)), steps)
