"""What a stage may return besides tensors: losses of its own, and tensors for a later stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from trainwright.pipeline_schedules.execute.boundary import BoundarySpec
from trainwright.pipeline_schedules.execute.errors import BoundaryError


@attrs.frozen(eq=False)
class StageOutput:
    """A stage's output with more than its boundary.

    Args:
        output: What the next stage, or the loss, is given.
        losses: Further sums over the microbatch, 0-d and at least float32, by name: backward
            starts from them in this stage, under the same divisor and scale.
        skips: Tensors for later stages, by the names of the `Skip` that starts here.
    """

    output: Any
    losses: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    skips: Mapping[str, torch.Tensor] = attrs.field(factory=dict)


def as_stage_output(returned: object) -> StageOutput:
    """What a stage returned, with no losses and no skips where it says nothing of them."""
    return returned if isinstance(returned, StageOutput) else StageOutput(returned)


def skips_behind(
    stage: int, boundary: BoundarySpec, arrived: Mapping[str, torch.Tensor], output: StageOutput
) -> dict[str, torch.Tensor]:
    """The skips that cross the boundary behind a stage: those that pass it and those it starts.

    Raises:
        BoundaryError: The stage did not return the tensors that start in it.
    """
    starting = {skip.name for skip in boundary.skips if skip.source == stage}
    if starting != set(output.skips):
        raise BoundaryError(
            f"stage {stage} must return the skips {sorted(starting)}, got {sorted(output.skips)}"
        )
    available = {**arrived, **output.skips}
    return {skip.name: available[skip.name] for skip in boundary.crossing(stage)}


def skips_into(
    stage: int, boundary: BoundarySpec, arrived: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The skips that a stage is given, as keyword arguments."""
    ending = {skip.name for skip in boundary.skips if skip.target == stage}
    return {name: tensor for name, tensor in arrived.items() if name in ending}
