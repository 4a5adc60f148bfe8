"""How tensors travel in operations of torch.distributed, which know fewer dtypes than torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainwright.collectives.calls import Call
from trainwright.collectives.protocol import ReduceOp

_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32}
# What every backend moves as it is; other dtypes travel as bytes.
_CARRIED = frozenset(
    (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8)
)
_ORDERED = (ReduceOp.MAX, ReduceOp.MIN)

# AVG is a sum, divided before it is rounded.
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


def is_carried(call: Call) -> bool:
    """Whether backends have an operation for the call's ``op``; NCCL has none on bits."""
    is_complex = call.dtype is not None and call.dtype.is_complex
    return call.op in _OPS and not (is_complex and call.op is ReduceOp.PRODUCT)


def wire_op(call: Call) -> Any:
    """Return the operation the backend runs for the call's ``op``."""
    assert call.op is not None
    return _OPS[call.op]


def to_wire(tensor: torch.Tensor, call: Call, copy: bool = False) -> torch.Tensor:
    """Return the tensor in the dtype in which it is combined; itself if that is its own."""
    assert call.reduce_dtype is not None
    dtype = _WIDER.get(call.reduce_dtype, call.reduce_dtype)
    if dtype.is_floating_point and call.op in _ORDERED:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        return _to_ordered_bits(tensor.to(wide), is_max=call.op is ReduceOp.MAX)
    if dtype is tensor.dtype and not copy and not dtype.is_complex:
        return tensor
    wire = tensor.to(dtype, copy=copy)
    return torch.view_as_real(wire) if dtype.is_complex else wire


def from_wire(output: torch.Tensor, wire: torch.Tensor, call: Call, size: int) -> None:
    """Divide where that is asked for, and round into ``output`` unless it is there already."""
    if call.op is ReduceOp.AVG:
        wire.div_(size)
    if wire.data_ptr() == output.data_ptr():
        return
    if output.is_complex():
        wire = torch.view_as_complex(wire)
    elif output.is_floating_point() and call.op in _ORDERED:
        wire = _from_ordered_bits(wire)
    output.copy_(wire.view_as(output))


def as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as flat elements that every backend can move."""
    elements = flat(tensor)
    return elements if elements.dtype in _CARRIED else elements.view(torch.uint8)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a contiguous tensor in one dim."""
    return tensor if tensor.ndim == 1 else tensor.view(-1)


# Backends disagree on the maximum of a number and a NaN, some hide it. Integers of the same order
# as the floats leave them no choice: positive floats compare as their bits do, negative ones the
# other way round, and NaN goes to the end that wins.


def _to_ordered_bits(values: torch.Tensor, is_max: bool) -> torch.Tensor:
    integer = torch.int64 if values.dtype is torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    bits = values.contiguous().view(integer)
    ordered = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return ordered.masked_fill_(values.isnan(), limits.max if is_max else limits.min)


def _from_ordered_bits(ordered: torch.Tensor) -> torch.Tensor:
    limits = torch.iinfo(ordered.dtype)
    bits = ordered ^ ((ordered >> (limits.bits - 1)) & limits.max)
    return bits.view(torch.float64 if ordered.dtype is torch.int64 else torch.float32)
