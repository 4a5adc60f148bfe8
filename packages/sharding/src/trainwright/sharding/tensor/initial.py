"""Initial values by place: what a rank draws depends on where in the whole tensor it stands."""

from __future__ import annotations

import torch

from trainwright.collectives import random
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement.parameters import ParameterPlacement


def draw_parameter_(
    parameter: torch.Tensor,
    placement: ParameterPlacement,
    key: random.Key,
    std: float,
    *,
    mean: float = 0.0,
) -> None:
    """Fill this rank's part of a parameter with normal draws, the same in every layout.

    Values are computed in float64 and rounded once, so runs in different dtypes start from the same
    weights. No generator of the process is used.

    Args:
        parameter: This rank's part; written in place.
        placement: Which boxes of the global tensor it holds.
        key: Seed and name; the name is the parameter's in the plain model.
        std: Standard deviation.
        mean: Mean.

    Raises:
        ShardingError: The parameter does not have the size of its boxes.
    """
    held = sum(box.numel for box in placement.boxes)
    if parameter.numel() != held:
        raise ShardingError(
            f"{key.name} has {parameter.numel()} elements but its boxes hold {held}"
        )
    drawn = [
        random.normal(
            key,
            placement.global_shape,
            mean=mean,
            std=std,
            box=box,
            dtype=parameter.dtype,
            device=parameter.device,
        ).reshape(-1)
        for box in placement.boxes
    ]
    if drawn:
        with torch.no_grad():
            parameter.copy_(torch.cat(drawn).view(parameter.shape))
