"""What the processes of a timed run do: check that all compute the same, then take turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import attrs
import torch

from tools.bench.processes import time_steps
from tools.bench.rounds import interleave
from tools.bench.tensor_memory import watch
from tools.bench.tensor_parallel import blocks, heads
from tools.bench.tensor_parallel.block import SHAPES as BLOCK_SHAPES
from trainwright.collectives import Communicator, SingleCommunicator

TOLERANCE = 1e-5
"""Largest difference of an output or a gradient, as a part of the largest of that tensor."""


class Contestant(Protocol):
    """One way to compute something forward and backward; one instance on each rank."""

    def step(self) -> None:
        """Run forward and backward once; gradients are made anew."""

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return outputs and gradients of the last step, whole or this rank's parts."""

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return of a whole result what ``results`` has under its name."""


@attrs.frozen
class Plan:
    """What to time.

    Args:
        kind: ``block`` or ``cross-entropy``.
        size: Name of the shape.
        names: The contestants.
        steps: Steps a round.
        rounds: How often each contestant has its turn.
    """

    kind: str
    size: str
    names: tuple[str, ...]
    steps: int
    rounds: int


@attrs.frozen
class Outcome:
    """What one rank saw, by contestant.

    Args:
        errors: The largest difference from one process, as a part of the largest element.
        held: The most bytes that tensors held in a step beyond what lives before it, gradients
            among them.
        seconds: Seconds a step in each round.
    """

    errors: dict[str, float]
    held: dict[str, int]
    seconds: dict[str, list[float]]

    @property
    def agrees(self) -> bool:
        """Whether all contestants compute the same."""
        return all(error <= TOLERANCE for error in self.errors.values())


def race(world: Communicator, plan: Plan) -> Outcome:
    """Check and weigh all contestants, then time them in turn, all alive in the same processes."""
    build, expected = _block(plan) if plan.kind == "block" else _head(plan)
    contestants = {name: build[name](world) for name in plan.names}
    errors: dict[str, float] = {}
    held: dict[str, int] = {}
    for name, contestant in contestants.items():
        contestant.step()
        errors[name] = _difference(contestant, expected)
    if not Outcome(errors, {}, {}).agrees:
        return Outcome(errors, {}, {})
    expected.clear()
    for name, contestant in contestants.items():
        memory = watch(contestant.step)
        held[name] = memory.peak - memory.lasting
    # What lives from here on need not be searched for garbage in the middle of a step.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), plan.rounds):
        for name in order:
            seconds[name].append(time_steps(contestants[name].step, plan.steps))
    return Outcome(errors, held, seconds)


_Builders = dict[str, Callable[[Communicator], Contestant]]


def _block(plan: Plan) -> tuple[_Builders, dict[str, torch.Tensor]]:
    shape = BLOCK_SHAPES[plan.size]
    oracle = blocks.Single(shape)
    oracle.step()
    made: _Builders = {name: partial(build, shape) for name, build in blocks.builders().items()}
    return made, dict(oracle.results())


def _head(plan: Plan) -> tuple[_Builders, dict[str, torch.Tensor]]:
    shape = heads.SHAPES[plan.size]
    oracle = heads.HeadContestant(shape, SingleCommunicator(), heads.of_one_process)
    oracle.step()
    made: _Builders = {name: partial(build, shape) for name, build in heads.builders().items()}
    return made, dict(oracle.results())


def _difference(contestant: Contestant, expected: Mapping[str, torch.Tensor]) -> float:
    worst = 0.0
    found = contestant.results()
    assert found.keys() == expected.keys(), f"{sorted(found)} is not {sorted(expected)}"
    for name, whole in expected.items():
        part = contestant.part(name, whole).reshape(found[name].shape)
        error = float((found[name] - part).abs().max() / whole.abs().max())
        # A comparison with NaN is never true, so max() might pass over one.
        worst = max(worst, error) if error == error else float("inf")
    return worst
