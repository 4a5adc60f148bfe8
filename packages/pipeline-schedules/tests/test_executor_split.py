"""Backwards in two parts: the gradients of whole ones, none computed twice, none forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from trainwright.collectives import SingleCommunicator
from trainwright.pipeline_schedules import Action, Kind, Schedule, gpipe
from trainwright.pipeline_schedules.execute import (
    PipelineExecutor,
    StepResult,
)

# Shapes: B rows, S positions, D width.

WIDTH = 4
MICROBATCHES = 3
Inputs = Callable[[int, int], Mapping[str, Any]]


def split_backwards(schedule: Schedule, delay: int) -> Schedule:
    """Put I in place of each B, and its W behind the computation ``delay`` places further on."""
    actions = []
    for rank in range(schedule.num_ranks):
        computed: list[Action] = []
        owed: list[tuple[int, Action]] = []
        for number, action in enumerate(schedule.program(rank)):
            computed.append(attrs.evolve(action, kind=Kind.I) if action.kind is Kind.B else action)
            if action.kind is Kind.B:
                owed.append((number + delay, attrs.evolve(action, kind=Kind.W)))
            while owed and owed[0][0] <= number:
                computed.append(owed.pop(0)[1])
        computed += [action for _, action in owed]
        rows = [(action.kind, action.stage, action.microbatch) for action in computed]
        actions.append(np.array(rows, dtype=np.int32))
    return Schedule(actions, schedule.rank_of_stage, schedule.num_microbatches, "split")


class Block(nn.Module):
    """All sorts of weights: with and without bias, used twice, frozen, a norm, an embedding."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = nn.Linear(WIDTH, 2 * WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.factor = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.weight.requires_grad_(False)
        self.position = nn.Embedding(8, WIDTH)
        self.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        normed_BSD = self.norm(hidden_BSD + self.position.weight[: hidden_BSD.shape[1]])
        gate_BSD, up_BSD = self.fused(normed_BSD).relu_().chunk(2, -1)
        once_BSD = self.twice(torch.tanh(gate_BSD) * up_BSD)
        rows_ND = self.twice(once_BSD).flatten(0, 1)
        rows_ND = torch.addmm(self.frozen.bias, rows_ND, self.factor.t()) @ self.factor
        return hidden_BSD + self.frozen(rows_ND.view_as(hidden_BSD))


UNSPLIT = ("norm", "position")


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()


def hidden(stage: int, microbatch: int) -> Mapping[str, Any]:
    if stage > 0:
        return {}
    generator = torch.Generator().manual_seed(microbatch)
    shape = (2, 3 + microbatch, WIDTH)
    return {"hidden_BSD": torch.randn(shape, generator=generator, dtype=torch.float64)}


def gradients_of(stage: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in stage.named_parameters()
    }


def assert_same(seen: Mapping[str, Any], right: Mapping[str, Any], tolerance: float = 0.0) -> None:
    assert seen.keys() == right.keys()
    for name, gradient in right.items():
        if gradient is None:
            assert seen[name] is None
        else:
            atol = tolerance * float(gradient.abs().max())
            torch.testing.assert_close(seen[name], gradient, rtol=0.0, atol=atol, msg=name)


def alone(
    schedule: Schedule, stage: nn.Module, inputs: Inputs = hidden, **options: Any
) -> StepResult:
    """One step of one stage, in this process."""
    options.setdefault("loss", squares)
    executor = PipelineExecutor(schedule, {0: stage}, SingleCommunicator(), **options)
    return executor.step(inputs, divisor=2.0)


def whole_and_split(
    make: Callable[[], nn.Module], inputs: Inputs = hidden, delay: int = 2, **options: Any
) -> tuple[nn.Module, nn.Module, StepResult]:
    """The same stage after a step of whole backwards, and after one of split ones."""
    whole, split = make(), make()
    schedule = gpipe(1, MICROBATCHES)
    alone(schedule, whole, inputs, **options)
    result = alone(split_backwards(schedule, delay), split, inputs, **options)
    return whole, split, result


@pytest.mark.parametrize("delay", [0, 1, 9])
def test_split_backwards_give_bit_for_bit_the_gradients_of_whole_ones(delay: int) -> None:
    whole, split, result = whole_and_split(Block, delay=delay)

    assert_same(gradients_of(split), gradients_of(whole))
    assert result.unsplit == {f"stage 0 {name}": MICROBATCHES for name in UNSPLIT}
    assert result.whole_backwards == 0
