"""The one-process oracle of the executor, for tests of stages and transports of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainwright.pipeline_schedules.execute.boundary import BoundarySpec, Skip
from trainwright.pipeline_schedules.execute.keywords import KeywordSplit
from trainwright.pipeline_schedules.execute.output import as_stage_output, skips_behind, skips_into
from trainwright.pipeline_schedules.execute.protocol import Inputs, Loss


def serial_step(
    stages: Sequence[torch.nn.Module],
    inputs: Inputs,
    loss: Loss,
    num_microbatches: int,
    *,
    divisor: float,
    loss_scale: float = 1.0,
    skips: Sequence[Skip] = (),
) -> torch.Tensor:
    """What a step of any schedule must do: the stages one after the other, one autograd graph.

    Returns:
        The loss sum, float64, 0-d, without the stages' further losses; gradients, of these too,
        are added to ``.grad``.
    """
    total = torch.zeros((), dtype=torch.float64)
    for microbatch in range(num_microbatches):
        losses = _losses(stages, BoundarySpec(skips=skips), inputs, loss, microbatch)
        total += losses[0].detach()
        seeds = [one.new_tensor(loss_scale / divisor) for one in losses if one.requires_grad]
        if seeds:
            torch.autograd.backward([one for one in losses if one.requires_grad], seeds)
    return total


def _losses(
    stages: Sequence[torch.nn.Module],
    boundary: BoundarySpec,
    inputs: Inputs,
    loss: Loss,
    microbatch: int,
) -> list[torch.Tensor]:
    """The loss, and those of the stages."""
    last = len(stages) - 1
    keywords = KeywordSplit(stages[last], loss)
    arguments: tuple[Any, ...] = ()
    skips: dict[str, torch.Tensor] = {}
    further: list[torch.Tensor] = []
    for_loss: Mapping[str, Any] = {}
    output: Any = None
    for number, stage in enumerate(stages):
        own = inputs(number, microbatch)
        if number == last:
            own, for_loss = keywords.split(own)
        returned = as_stage_output(stage(*arguments, **own, **skips_into(number, boundary, skips)))
        skips = skips_behind(number, boundary, skips, returned)
        further += returned.losses.values()
        output = returned.output
        arguments = tuple(output) if isinstance(output, tuple | list) else (output,)
    return [loss(output, **for_loss), *further]
