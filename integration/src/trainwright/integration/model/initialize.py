"""Initial weights by name and place: the same in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from trainwright.collectives import random
from trainwright.integration.model.shape import ModelShape
from trainwright.sharding import ParameterPlacement, draw_parameter_

WEIGHT_STD = 0.02
WRITERS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
"""What the names of weights that write into the residual stream end with."""


def initializer(
    placements: Mapping[str, ParameterPlacement], shape: ModelShape, seed: int
) -> Callable[[str, nn.Module], None]:
    """Return what fills a module's own parameters with the plain model's values at their place.

    Matrices are normal with a standard deviation of 0.02, those that write into the residual
    stream divided by √(2·layers); biases are zeros, other vectors ones, buffers zeros. Each element
    depends on seed, parameter name and global index alone.

    Args:
        placements: of every parameter, by its full name.
        shape: the sizes of the model.
        seed: of all draws.

    Source: Radford et al., GPT-2, section 2.3, for the scaling of residual projections.
    """

    @torch.no_grad()
    def initialize(path: str, module: nn.Module) -> None:
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            placement = placements[name]
            if len(placement.global_shape) < 2:
                parameter.fill_(0.0 if own == "bias" else 1.0)
                continue
            writes_residual = name.endswith(WRITERS)
            std = WEIGHT_STD / (2 * shape.layers) ** 0.5 if writes_residual else WEIGHT_STD
            draw_parameter_(parameter, placement, random.Key(seed, name), std)

    return initialize


def initialize_(
    module: nn.Module,
    placements: Mapping[str, ParameterPlacement],
    shape: ModelShape,
    seed: int,
) -> None:
    """Fill every parameter of a module that has its memory already; see `initializer`."""
    initialize = initializer(placements, shape, seed)
    for path, part in module.named_modules():
        initialize(path, part)
