"""Compiled stages: a split backward of theirs is that of plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainwright.collectives import SingleCommunicator
from trainwright.pipeline_schedules import zb_h1
from trainwright.pipeline_schedules.execute import PipelineExecutor, StepResult


def stage_of(seed: int) -> nn.Module:
    stage = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(seed)
    for parameter in stage.parameters():
        nn.init.normal_(parameter, generator=generator)
    return stage


def inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
    return {"input": torch.linspace(0, 1 + microbatch, 6).view(2, 3)}


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def step_of(stage: nn.Module) -> StepResult:
    executor = PipelineExecutor(zb_h1(1, 2), {0: stage}, SingleCommunicator(), loss=squares)
    executor.step(inputs, divisor=1.0)
    return executor.step(inputs, divisor=1.0)


def test_a_compiled_stage_has_the_gradients_of_a_plain_one_and_leaves_as_much_to_w() -> None:
    plain, own = stage_of(1), stage_of(1)
    compiled: Any = torch.compile(own, backend="aot_eager")

    right = step_of(plain)
    with warnings.catch_warnings():
        # Dynamo says once that it does not trace what finds the products.
        warnings.simplefilter("ignore")
        seen = step_of(compiled)

    for one, other in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert torch.equal(seen.loss_sum, right.loss_sum)
    assert seen.whole_backwards == right.whole_backwards == 0
    assert [*seen.unsplit.values()] == [*right.unsplit.values()]
    torch._dynamo.reset()
