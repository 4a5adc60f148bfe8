"""What a call must satisfy before any rank moves a byte."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence, Sized

import torch

from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Recv, ReduceOp, Send

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ORDERED = (ReduceOp.MAX, ReduceOp.MIN)


def check_tensor(what: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor without its graph, or raise where communicating would lose something."""
    check_is_tensor(what, tensor)
    if tensor.device != device:
        raise UsageError(
            f"{what}: the tensor is on {tensor.device}, this communicator works on {device}; "
            f"move the tensor with .to({str(device)!r}) or make the communicator with device="
        )
    if tensor.layout is not torch.strided:
        raise UsageError(f"{what}: {tensor.layout} tensors cannot travel; use .to_dense()")
    if not tensor.requires_grad:
        return tensor
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise UsageError(
            f"{what}: the tensor is part of a graph and its gradient would be lost; use "
            "trainwright.collectives.differentiable, or .detach() or no_grad() if that is meant"
        )
    return tensor.detach()


def check_is_tensor(what: str, tensor: object) -> None:
    """Refuse lists, arrays and numbers."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{what}: expected a tensor, got {type(tensor).__name__}")


def check_writable(what: str, tensor: torch.Tensor) -> None:
    """Refuse outputs in which several elements share one place in memory."""
    reach = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride < reach:
            raise UsageError(
                f"{what}: the tensor is written to, but its elements share memory (shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}, as after .expand()); "
                "use .clone()"
            )
        reach += stride * (length - 1)


def check_same_dtype(what: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Refuse a pair of different dtypes."""
    check_is_tensor(what, output)
    check_is_tensor(what, input)
    if output.dtype is not input.dtype:
        raise UsageError(
            f"{what}: output is {describe_dtype(output.dtype)} and input "
            f"{describe_dtype(input.dtype)}; they must be alike"
        )


def check_concatenated(what: str, large: torch.Tensor, small: torch.Tensor, size: int) -> None:
    """Refuse a large tensor that is not ``size`` small ones along dim 0."""
    rows: Sequence[int] = small.shape or (1,)
    whole = large.shape
    if len(whole) != len(rows) or whole[0] != size * rows[0] or whole[1:] != rows[1:]:
        expected = [size * rows[0], *rows[1:]]
        raise UsageError(
            f"{what}: a part is {list(small.shape)} and there are {size} ranks, so the whole must "
            f"be {expected}, got {list(large.shape)}"
        )


def check_own_slice(what: str, large: torch.Tensor, small: torch.Tensor, rank: int) -> None:
    """Refuse contiguous tensors that overlap, unless the small one is this rank's part."""
    start = large.data_ptr()
    part = small.data_ptr()
    part_bytes = small.nbytes
    if part + part_bytes <= start or start + large.nbytes <= part:
        return
    if part_bytes and part != start + rank * part_bytes:
        raise UsageError(
            f"{what}: input and output overlap; only this rank's own slice (rows of rank {rank}) "
            "of the large tensor may serve as the small one"
        )


def check_apart(what: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Refuse contiguous tensors that overlap."""
    out = output.data_ptr()
    into = input.data_ptr()
    if out + output.nbytes <= into or into + input.nbytes <= out:
        return
    raise UsageError(f"{what}: input and output overlap; give them separate memory")


def check_rank(what: str, role: str, rank: int, size: int) -> None:
    """Refuse a root or peer outside the group."""
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise UsageError(
            f"{what}: {role}={rank!r} is not a rank of this communicator; they are 0..{size - 1}"
        )


def check_peer(what: str, peer: int, rank: int, size: int) -> None:
    """Refuse a peer outside the group, or oneself."""
    check_rank(what, "peer", peer, size)
    if peer == rank:
        raise UsageError(f"{what}: rank {rank} cannot be its own peer; copy the tensor instead")


def check_only_on_root(
    what: str, name: str, tensor: torch.Tensor | None, root: int, rank: int
) -> None:
    """Refuse a large tensor that is missing on the root or given elsewhere."""
    if (tensor is None) == (rank == root):
        rule = "needs" if rank == root else "must pass None as"
        raise UsageError(f"{what}: rank {rank} {rule} {name}, root={root}")


def check_messages(messages: Sequence[Send | Recv]) -> Sequence[Send | Recv]:
    """Return the messages, or refuse what are none or can be gone through only once."""
    if not isinstance(messages, Sequence):
        raise UsageError(
            f"exchange: expected a list of Send and Recv, got {type(messages).__name__}"
        )
    for message in messages:
        if not isinstance(message, Send | Recv):
            raise UsageError(
                f"exchange: expected a list of Send and Recv, got {type(message).__name__} in it"
            )
        if not isinstance(message.tag, int):
            raise UsageError(f"exchange: tag={message.tag!r} must be an int")
    return messages


def check_timeout(what: str, timeout_s: float | None) -> None:
    """Refuse a timeout that is over before it begins, or is no time."""
    if timeout_s is None:
        return
    if not isinstance(timeout_s, float | int | numbers.Real):
        raise UsageError(f"{what}: timeout_s={timeout_s!r} must be a number of seconds or None")
    if not timeout_s > 0:
        raise UsageError(f"{what}: timeout_s={timeout_s} must be positive")


def check_at_least_one(what: str, name: str, value: object) -> None:
    """Refuse what does not count at least one."""
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{what}: {name}={value!r} must be a number of at least 1")


def check_color(color: int | None, key: int) -> None:
    """Refuse what cannot be compared between ranks."""
    if not (color is None or isinstance(color, int)) or not isinstance(key, int):
        raise UsageError(f"split: color={color!r} must be an int or None and key={key!r} an int")


def check_rows(what: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Refuse tensors whose rows (all dims but the first) differ."""
    if not output.ndim or not input.ndim or output.shape[1:] != input.shape[1:]:
        raise UsageError(
            f"{what}: output {list(output.shape)} and input {list(input.shape)} must have rows of "
            "one shape"
        )


def resolve_splits(
    what: str, name: str, splits: Sequence[int] | None, tensor: torch.Tensor, size: int
) -> list[int]:
    """Return the rows for each rank, or raise where they do not cut the tensor."""
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise UsageError(
                f"{what}: {rows} rows cannot be cut equally over {size} ranks; pass {name}, or use "
                f"{rows - rows % size} or {rows + size - rows % size} rows"
            )
        return [rows // size] * size
    try:
        parts = [operator.index(part) for part in splits] if isinstance(splits, Sized) else None
    except TypeError:
        parts = None
    if parts is None:
        raise UsageError(f"{what}: {name}={splits!r} must be a list of {size} whole numbers")
    if len(parts) != size or sum(parts) != rows or any(part < 0 for part in parts):
        raise UsageError(
            f"{what}: {name}={parts} must be {size} numbers >= 0 that add up to the {rows} rows"
        )
    return parts


def resolve_reduce_dtype(
    what: str, dtype: torch.dtype, op: ReduceOp, requested: torch.dtype | None
) -> torch.dtype:
    """Return the dtype contributions are combined in, or raise where ``op`` has no meaning."""
    _check_kinds(what, op, requested)
    if op.is_logical:
        if requested not in (None, torch.bool):
            raise UsageError(
                f"{what}: {op.name} combines truth values, not {requested}; leave reduce_dtype out"
            )
        return torch.bool
    if op.is_bitwise and (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"{what}: {op.name} is for integers and bool, not {describe_dtype(dtype)}; use "
            f"{op.name.replace('BITWISE', 'LOGICAL')}, or .view() of an integer dtype"
        )
    if dtype.is_floating_point:
        return _resolve_floating(what, dtype, requested)
    if dtype.is_complex:
        if op in _ORDERED:
            raise UsageError(f"{what}: complex numbers have no order, so no {op.name}")
        if requested is not None and not requested.is_complex:
            raise UsageError(f"{what}: complex numbers cannot be added in {requested}")
        return requested or dtype
    if dtype is torch.bool:
        if op not in _ORDERED and not op.is_bitwise:
            raise UsageError(
                f"{what}: {op.name} of bool is ambiguous; use LOGICAL_OR, LOGICAL_AND, "
                "LOGICAL_XOR, or .to(int64)"
            )
    elif dtype not in _INTEGERS:
        raise UsageError(
            f"{what}: no arithmetic in {describe_dtype(dtype)}; convert it to int64 or float32"
        )
    elif op is ReduceOp.AVG:
        raise UsageError(
            f"{what}: AVG of {describe_dtype(dtype)} would have to round; use SUM and divide, or "
            "convert to a floating-point dtype"
        )
    if requested not in (None, dtype) and requested not in _INTEGERS:
        raise UsageError(
            f"{what}: {describe_dtype(dtype)} values are not combined in {requested}; leave "
            "reduce_dtype out, or give an integer dtype"
        )
    return requested or dtype


def _check_kinds(what: str, op: object, requested: object) -> None:
    if not isinstance(op, ReduceOp):
        raise UsageError(f"{what}: op must be a ReduceOp, got {op!r}")
    if not (requested is None or isinstance(requested, torch.dtype)):
        raise UsageError(f"{what}: reduce_dtype must be a torch.dtype or None, got {requested!r}")


def _resolve_floating(what: str, dtype: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    if requested is None:
        return dtype if dtype.itemsize >= 4 else torch.float32
    if not requested.is_floating_point or requested.itemsize < 2:
        raise UsageError(
            f"{what}: reduce_dtype={requested} cannot add {describe_dtype(dtype)} values; use "
            "float32, float64, or a 16-bit floating-point dtype"
        )
    return requested
