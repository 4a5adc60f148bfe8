"""Element-wise combination of the ranks' contributions, always in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainwright.collectives.protocol import ReduceOp

# The parts and the running total of one chunk stay in a core's cache.
CHUNK = 1 << 16

_IN_PLACE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part.to(total.dtype), out=total),
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part.to(total.dtype), out=total),
    ReduceOp.LOGICAL_AND: torch.Tensor.logical_and_,
    ReduceOp.LOGICAL_OR: torch.Tensor.logical_or_,
    ReduceOp.LOGICAL_XOR: torch.Tensor.logical_xor_,
    ReduceOp.BITWISE_AND: lambda total, part: total.bitwise_and_(part.to(total.dtype)),
    ReduceOp.BITWISE_OR: lambda total, part: total.bitwise_or_(part.to(total.dtype)),
    ReduceOp.BITWISE_XOR: lambda total, part: total.bitwise_xor_(part.to(total.dtype)),
}


def combine(
    outputs: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    op: ReduceOp,
    reduce_dtype: torch.dtype,
) -> None:
    """Write the combination of flat ``parts`` into each of the flat ``outputs``.

    Elements are combined from the first part to the last in ``reduce_dtype`` and rounded once, so
    every way of cutting tensors into pieces gives the same bits. AVG divides the exact sum. An
    output may be one of the parts.
    """
    numel = parts[0].numel()
    if numel <= CHUNK:
        _combine_chunk(outputs, parts, op, reduce_dtype)
        return
    for start in range(0, numel, CHUNK):
        cut = slice(start, start + CHUNK)
        _combine_chunk(
            [out[cut] for out in outputs], [part[cut] for part in parts], op, reduce_dtype
        )


def accumulate(total: torch.Tensor, part: torch.Tensor, op: ReduceOp) -> None:
    """Combine one more part into ``total``, in the dtype of ``total``; AVG adds."""
    _IN_PLACE[op](total, part.to(torch.bool) if op.is_logical else part)


def _combine_chunk(
    outputs: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    op: ReduceOp,
    reduce_dtype: torch.dtype,
) -> None:
    if len(parts) == 2 and op is ReduceOp.SUM and reduce_dtype is parts[0].dtype:
        first = outputs[0]
        torch.add(parts[0], parts[1], out=first)
        for output in outputs[1:]:
            output.copy_(first)
        return
    total = parts[0].to(reduce_dtype, copy=True)
    for part in parts[1:]:
        accumulate(total, part, op)
    if op is ReduceOp.AVG:
        # Complex division by a number rounds more than once.
        quotient = torch.view_as_real(total) if total.is_complex() else total
        quotient.div_(len(parts))
    for output in outputs:
        output.copy_(total)


def normalize_device(device: torch.device | str) -> torch.device:
    """Return the device with its index, so that it compares equal to a tensor's device."""
    given = torch.device(device)
    if str(given) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return given
