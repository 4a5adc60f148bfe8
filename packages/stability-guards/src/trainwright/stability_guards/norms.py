"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trainwright.collectives import Communicator, ReduceOp


def global_norm(
    gradients: Sequence[torch.Tensor], norm_type: float, communicator: Communicator | None
) -> torch.Tensor:
    """Return the p-norm of all ranks' gradients, taken as one vector.

    Args:
        gradients: this rank's part; it may be empty.
        norm_type: p, positive or ``math.inf``.
        communicator: the ranks; None for this process alone.

    Returns:
        0-d float64 tensor, the same on every rank; infinite or NaN where a gradient is.

    Communicates:
        One all-reduce of 8 bytes (SUM of p-th powers), or 16 (MAX) for the infinity norm.
    """
    norms = _norm_of_each(gradients, norm_type, communicator)
    if norm_type == math.inf:
        return _largest(norms, communicator)
    total = norms.pow(norm_type).sum()
    if communicator is not None:
        communicator.all_reduce(total, ReduceOp.SUM).wait()
    return total.pow(1.0 / norm_type)


def _norm_of_each(
    gradients: Sequence[torch.Tensor], norm_type: float, communicator: Communicator | None
) -> torch.Tensor:
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        # An empty shard adds nothing, and has no largest element.
        if gradient.numel():
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    if communicator is not None:
        device = communicator.device
    else:
        device = gradients[0].device if gradients else torch.device("cpu")
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (_, dtype), same_kind in kinds.items():
        wide = torch.promote_types(dtype, torch.float32)
        each = torch._foreach_norm(same_kind, norm_type, dtype=wide)
        norms.append(torch.stack(each).to(device, torch.float64))
    return torch.cat(norms)


def _largest(norms: torch.Tensor, communicator: Communicator | None) -> torch.Tensor:
    # MAX over ranks may drop NaN, so NaN travels as a number of its own.
    is_nan = norms.isnan()
    packed = torch.stack([torch.where(is_nan, 0.0, norms).amax(), is_nan.any().double()])
    if communicator is not None:
        communicator.all_reduce(packed, ReduceOp.MAX).wait()
    return torch.where(packed[1] > 0, math.nan, packed[0])
