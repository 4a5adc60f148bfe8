"""Initial weights by name and place: the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trainwright.collectives import random
from trainwright.integration.model.shape import ModelShape
from trainwright.sharding import ParameterPlacement, draw_parameter_

WEIGHT_STD = 0.02


@torch.no_grad()
def initialize_(
    module: nn.Module,
    placements: Mapping[str, ParameterPlacement],
    shape: ModelShape,
    seed: int,
) -> None:
    """Fill every parameter with the values the plain model has at the same place.

    Matrices are normal with a standard deviation of 0.02, those that write into the residual
    stream divided by √(2·layers); vectors are ones. Each element depends on seed, parameter name
    and global index alone.

    Source: Radford et al., GPT-2, section 2.3, for the scaling of residual projections.
    """
    for name, parameter in module.named_parameters():
        placement = placements[name]
        if len(placement.global_shape) < 2:
            parameter.fill_(1.0)
            continue
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = WEIGHT_STD / (2 * shape.layers) ** 0.5 if writes_residual else WEIGHT_STD
        draw_parameter_(parameter, placement, random.Key(seed, name), std)
