"""The one-process oracle of the executor, for tests of stages and transports of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainwright.pipeline_schedules.execute.protocol import Inputs, Loss
from trainwright.pipeline_schedules.execute.stage_runner import KeywordSplit


def serial_step(
    stages: Sequence[torch.nn.Module],
    inputs: Inputs,
    loss: Loss,
    num_microbatches: int,
    *,
    divisor: float,
    loss_scale: float = 1.0,
) -> torch.Tensor:
    """What a step of any schedule must do: the stages one after the other, one autograd graph.

    Returns:
        The loss sum, float64, 0-d; gradients are added to ``.grad``.
    """
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(num_microbatches):
        loss_of_one = _forward(stages, inputs, loss, microbatch)
        total += loss_of_one.detach()
        if loss_of_one.requires_grad:
            (loss_of_one * (loss_scale / divisor)).backward()  # type: ignore[no-untyped-call]
    return total


def _forward(
    stages: Sequence[torch.nn.Module], inputs: Inputs, loss: Loss, microbatch: int
) -> torch.Tensor:
    arguments: tuple[Any, ...] = ()
    for number, stage in enumerate(stages[:-1]):
        output = stage(*arguments, **inputs(number, microbatch))
        arguments = tuple(output) if isinstance(output, tuple | list) else (output,)
    split = KeywordSplit(stages[-1], loss)
    for_stage, for_loss = split.split(inputs(len(stages) - 1, microbatch))
    return loss(stages[-1](*arguments, **for_stage), **for_loss)
