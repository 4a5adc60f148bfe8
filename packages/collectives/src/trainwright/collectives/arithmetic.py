"""Element-wise combination of the ranks' contributions, always in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.protocol import ReduceOp


def combine(parts: Sequence[torch.Tensor], op: ReduceOp, reduce_dtype: torch.dtype) -> torch.Tensor:
    """Return the parts combined from first to last, in a new tensor of ``reduce_dtype``.

    The order of additions is that of the parts and nothing else, so every way of cutting a tensor
    into pieces gives the same bits. AVG divides the sum, before it is rounded to another dtype.
    """
    total = parts[0].to(reduce_dtype, copy=True)
    for part in parts[1:]:
        accumulate(total, part, op)
    if op is ReduceOp.AVG:
        total.div_(len(parts))
    return total


def accumulate(total: torch.Tensor, part: torch.Tensor, op: ReduceOp) -> None:
    """Combine one more part into ``total``, in the dtype of ``total``."""
    part = part.to(total.dtype)
    if op is ReduceOp.SUM or op is ReduceOp.AVG:
        total.add_(part)
    elif op is ReduceOp.MAX:
        torch.maximum(total, part, out=total)
    elif op is ReduceOp.MIN:
        torch.minimum(total, part, out=total)
    else:
        total.mul_(part)


def normalize_device(device: torch.device | str) -> torch.device:
    """Return the device with its index, so that it compares equal to a tensor's device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
