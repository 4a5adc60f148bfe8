"""What the processes of a timed run do: check that all compute the same, then take turns."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import attrs
import torch

from tools.bench.context.contestants import SHAPES, Attention, Contestant, builders, single
from tools.bench.processes import time_steps
from tools.bench.rounds import interleave
from tools.bench.tensor_memory import watch
from trainwright.collectives import Communicator

TOLERANCE = 1e-5
"""Largest difference of an output or a gradient, as a part of the largest of that tensor."""


@attrs.frozen
class Plan:
    """What to time.

    Args:
        size: Name of the shape.
        names: The contestants.
        steps: Steps a round.
        rounds: How often each contestant has its turn.
    """

    size: str
    names: tuple[str, ...]
    steps: int
    rounds: int


@attrs.frozen
class Outcome:
    """What one rank saw, by contestant.

    Args:
        errors: The largest difference from one process, as a part of the largest element.
        held: The most bytes that tensors held in a step, inputs and results among them.
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
    shape = SHAPES[plan.size]
    oracle = single(shape)
    oracle.step()
    expected = oracle.results()
    assert expected is not None, "a step has results"
    made = builders(shape)
    contestants = {name: made[name](world) for name in plan.names}
    errors: dict[str, float] = {}
    held: dict[str, int] = {}
    for name, contestant in contestants.items():
        memory = watch(contestant.step)
        held[name] = memory.peak - memory.lasting + contestant.input_bytes
        errors[name] = _difference(contestant, expected)
        if isinstance(contestant, Attention):
            contestant.forget()
    if not Outcome(errors, {}, {}).agrees:
        return Outcome(errors, {}, {})
    oracle.forget()
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), plan.rounds):
        for name in order:
            seconds[name].append(time_steps(contestants[name].step, plan.steps))
    return Outcome(errors, held, seconds)


def _difference(contestant: Contestant, expected: Mapping[str, torch.Tensor]) -> float:
    found = contestant.results()
    worst = 0.0
    for name, whole in expected.items() if found is not None else ():
        assert found is not None, "checked above"
        error = float((found[name] - contestant.part(whole)).abs().max() / whole.abs().max())
        # A comparison with NaN is never true, so max() might pass over one.
        worst = max(worst, error) if error == error else float("inf")
    return worst
