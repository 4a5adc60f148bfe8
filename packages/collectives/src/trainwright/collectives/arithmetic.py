"""Element-wise combination of the ranks' contributions, always in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainwright.collectives.protocol import ReduceOp

# An operation costs microseconds whatever its size, so that it pays to take much at once; but the
# last of the caches should still have what is read again: the sum when it is copied, or scratch.
_PLAIN_BYTES = 1 << 21
_WIDE_NUMEL = 1 << 18

_HALVES = (torch.bfloat16, torch.float16)
_SUMS = (ReduceOp.SUM, ReduceOp.AVG)

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
    Combiner().combine(outputs, parts, op, reduce_dtype)


def accumulate(total: torch.Tensor, part: torch.Tensor, op: ReduceOp) -> None:
    """Combine one more part into ``total``, in the dtype of ``total``; AVG adds."""
    _IN_PLACE[op](total, part.to(torch.bool) if op.is_logical else part)


class Combiner:
    """Does what `combine` does, through memory that it keeps; one thread at a time uses it."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.dtype, torch.device, bool], torch.Tensor] = {}

    def combine(
        self,
        outputs: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        op: ReduceOp,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Write the combination of flat ``parts`` into each of the flat ``outputs``."""
        if op in _SUMS and _are_added_plainly(outputs, parts, op, reduce_dtype):
            late = _last_reader(outputs[0], parts)
            step = _WIDE_NUMEL if late > 1 else _PLAIN_BYTES // parts[0].dtype.itemsize
            for outs, some in _cut(outputs, parts, step):
                self._add_plainly(outs, some, op, late)
            return
        for outs, some in _cut(outputs, parts, _WIDE_NUMEL):
            self._combine_apart(outs, some, op, reduce_dtype)

    def _add_plainly(
        self,
        outputs: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        op: ReduceOp,
        late: int,
    ) -> None:
        """Let the sum grow in the first output, from where that is no longer needed as a part."""
        first, *others = outputs
        total = parts[0]
        memory = self._take(first.dtype, first, False) if late > 1 else first
        for number, part in enumerate(parts[1:], 1):
            target = first if number >= late else memory
            torch.add(total, part, out=target)
            total = target
        if op is ReduceOp.AVG:
            _divide(first, len(parts))
        for other in others:
            other.copy_(first)

    def _combine_apart(
        self,
        outputs: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        op: ReduceOp,
        wide: torch.dtype,
    ) -> None:
        total = self._take(wide, parts[0], False).copy_(parts[0])
        for part in parts[1:]:
            if op in _SUMS and part.dtype is not wide:
                # PyTorch would convert it in fresh memory.
                part = self._take(wide, part, True).copy_(part)
            accumulate(total, part, op)
        if op is ReduceOp.AVG:
            _divide(total, len(parts))
        first, *others = outputs
        first.copy_(total)
        for other in others:
            other.copy_(first if other.dtype is first.dtype else total)

    def _take(self, dtype: torch.dtype, like: torch.Tensor, is_second: bool) -> torch.Tensor:
        key = (dtype, like.device, is_second)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < like.numel():
            with torch.inference_mode(False):
                memory = torch.empty(like.numel(), dtype=dtype, device=like.device)
            self._memory[key] = memory
        return memory[: like.numel()]


def normalize_device(device: torch.device | str) -> torch.device:
    """Return the device with its index, so that it compares equal to a tensor's device."""
    given = torch.device(device)
    if str(given) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return given


def _are_added_plainly(
    outputs: Sequence[torch.Tensor],
    parts: Sequence[torch.Tensor],
    op: ReduceOp,
    wide: torch.dtype,
) -> bool:
    """Whether PyTorch's own sums of the parts are rounded as ours are."""
    dtype = parts[0].dtype
    if len(parts) < 2 or any(tensor.dtype is not dtype for tensor in (*parts, *outputs)):
        return False
    # It adds two numbers of 16 bits in float32 and rounds the sum once.
    is_pair = len(parts) == 2 and dtype in _HALVES and wide is torch.float32
    return dtype is wide or (is_pair and op is ReduceOp.SUM)


def _last_reader(output: torch.Tensor, parts: Sequence[torch.Tensor]) -> int:
    """Return the number of the last part in the output's memory, or 0."""
    return max((number for number, part in enumerate(parts) if _overlap(output, part)), default=0)


def _divide(total: torch.Tensor, count: int) -> None:
    # Complex division by a number rounds more than once.
    quotient = torch.view_as_real(total) if total.is_complex() else total
    quotient.div_(count)


def _cut(
    outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], step: int
) -> list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]:
    """Return the same elements of all, up to ``step`` at a time."""
    numel = parts[0].numel()
    if numel <= step:
        return [(outputs, parts)]
    cuts = [slice(start, start + step) for start in range(0, numel, step)]
    return [([out[cut] for out in outputs], [part[cut] for part in parts]) for cut in cuts]


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes
