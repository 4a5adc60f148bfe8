"""Sums of p-th powers, from which norms are made; for infinity the largest magnitude and NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def power_sums(
    tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    """Return what ranks add up (or take the maximum of) to learn a p-norm.

    Returns:
        float64 on ``device``: [sum of p-th powers], or for infinity [largest, 1 where one is NaN],
        since a maximum over ranks may drop NaN.
    """
    norms = _norm_of_each(tensors, norm_type, device)
    if norm_type != math.inf:
        return norms.pow(norm_type).sum().reshape(1)
    is_nan = norms.isnan()
    return torch.stack([torch.where(is_nan, 0.0, norms).amax(), is_nan.any().double()])


def join(first: torch.Tensor, second: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the sums of the elements of both."""
    return torch.maximum(first, second) if norm_type == math.inf else first + second


def norm_from(sums: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the 0-d norm that the sums of all elements stand for."""
    if norm_type == math.inf:
        return torch.where(sums[1] > 0, math.nan, sums[0])
    return sums[0].pow(1.0 / norm_type)


def _norm_of_each(
    tensors: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        # An empty shard adds nothing, and has no largest element.
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (_, dtype), same_kind in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        each = torch._foreach_norm(same_kind, norm_type, dtype=wide)
        norms.append(torch.stack(each).to(device, torch.float64))
    return torch.cat(norms)
