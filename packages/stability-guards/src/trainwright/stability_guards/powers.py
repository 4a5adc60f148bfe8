"""Sums of p-th powers, from which norms are made; for infinity the largest magnitude and NaN."""

from __future__ import annotations

import math

import torch

from trainwright.stability_guards.gradients import Kinds


def power_sums(kinds: Kinds, norm_type: float, device: torch.device) -> torch.Tensor:
    """Return what ranks add up (or take the maximum of) to learn a p-norm.

    Args:
        kinds: the tensors, by device and dtype.
        norm_type: p, positive or ``math.inf``.
        device: where the result lives.

    Returns:
        float64 on ``device``: [sum of p-th powers], or for infinity [largest, 1 where one is NaN],
        since a maximum over ranks may drop NaN.
    """
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (_, dtype), tensors in kinds.items():
        if norm_type == math.inf:
            # An empty shard has no largest element.
            tensors = [tensor for tensor in tensors if tensor.numel()]
        if tensors:
            wide = torch.promote_types(dtype, torch.float32)
            each = torch._foreach_norm(tensors, norm_type, dtype=None if wide == dtype else wide)
            norms.append(torch.stack(each).to(device, torch.float64))
    joined = torch.cat(norms)
    if norm_type != math.inf:
        return joined.pow(norm_type).sum().reshape(1)
    is_nan = joined.isnan()
    return torch.stack([torch.where(is_nan, 0.0, joined).amax(), is_nan.any().double()])


def join(first: torch.Tensor, second: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the sums of the elements of both."""
    return torch.maximum(first, second) if norm_type == math.inf else first + second


def norm_from(sums: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the 0-d norm that the sums of all elements stand for."""
    if norm_type == math.inf:
        return torch.where(sums[1] > 0, math.nan, sums[0])
    return sums[0].pow(1.0 / norm_type)
