"""Encoded parts under way: what compressed collectives check, start and decode."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.collectives.arithmetic import accumulate
from trainwright.collectives.checks import (
    check_concatenated,
    check_same_dtype,
    check_tensor,
    check_writable,
    resolve_reduce_dtype,
)
from trainwright.collectives.codec.packing import Packing
from trainwright.collectives.codec.protocol import Codec
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, ReduceOp, Work


class DecodingWork:
    """The Work of bytes under way; waiting decodes them."""

    __slots__ = ("_decode", "_error", "_work")

    def __init__(self, work: Work, decode: Callable[[], None]) -> None:
        self._work = work
        self._decode: Callable[[], None] | None = decode
        self._error: BaseException | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the bytes, then write the result; where that fails, each wait says so."""
        self._work.wait(timeout_s)
        if self._error is not None:
            raise self._error
        decode, self._decode = self._decode, None
        if decode is None:
            return
        try:
            with torch.no_grad():
                decode()
        except BaseException as error:
            # What has been added up in part cannot be begun anew, and is no result.
            self._error = error
            raise

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the bytes have come, decoded or not."""
        return self._work.is_done(within_s)


def start_gather(
    comm: Communicator,
    output: torch.Tensor,
    source: torch.Tensor,
    codec: Codec,
    parts: tuple[torch.Tensor, ...],
    timeout_s: float | None,
) -> Work:
    """Start the gather of ``parts``, which is what ``source`` was encoded to."""
    packing = Packing.of(parts)
    rows = source.new_empty((comm.size, packing.num_bytes), dtype=torch.uint8)
    packing.pack(parts, rows[comm.rank])
    work = comm.all_gather(rows.view(-1), rows[comm.rank], timeout_s=timeout_s)
    target = output.detach()
    shape, dtype = source.shape, target.dtype

    def decode() -> None:
        for part, row in zip(target.chunk(comm.size) if target.numel() else (), rows, strict=False):
            part.copy_(codec.decode(packing.unpack(row), shape, dtype).view(part.shape))

    return DecodingWork(work, decode)


def start_scatter(
    comm: Communicator,
    output: torch.Tensor,
    source: torch.Tensor,
    codec: Codec,
    op: ReduceOp,
    timeout_s: float | None,
    lost: torch.Tensor | None = None,
) -> Work:
    """Start the reduction; into ``lost`` goes what encoding lost of ``source``."""
    shape = output.shape
    wide = resolve_reduce_dtype("compressed_reduce_scatter", source.dtype, op, None)
    parts = source.reshape(comm.size, *shape)
    own = parts[comm.rank].to(wide, copy=True)
    encoded = [codec.encode(part) for part in parts]
    packing = Packing.of(encoded[0])
    leaving = source.new_empty((comm.size, packing.num_bytes), dtype=torch.uint8)
    for row, pieces in zip(leaving, encoded, strict=True):
        packing.pack(pieces, row)
    arriving = torch.empty_like(leaving)
    work = comm.all_to_all(arriving, leaving, timeout_s=timeout_s)
    if lost is not None:
        for rank, rest in enumerate(lost.view(comm.size, *shape)):
            if rank != comm.rank:
                torch.sub(parts[rank], codec.decode(encoded[rank], shape, wide), out=rest)
    target = output.detach()

    def decode() -> None:
        total: torch.Tensor | None = None
        for rank, row in enumerate(arriving):
            part = own if rank == comm.rank else codec.decode(packing.unpack(row), shape, wide)
            if total is None:
                total = part
            else:
                accumulate(total, part, op)
        assert total is not None
        target.copy_(total.div_(comm.size) if op is ReduceOp.AVG else total)

    return DecodingWork(work, decode)


def check_codec(what: str, codec: object) -> None:
    """Refuse what neither encodes nor decodes, and a kind of codec in place of a codec."""
    if isinstance(codec, type) or not isinstance(codec, Codec):
        raise UsageError(f"{what}: expected a codec, such as BlockInt8(), got {codec!r}")


def check_gather(
    what: str, comm: Communicator, output: torch.Tensor, input: torch.Tensor, codec: Codec
) -> torch.Tensor:
    """Return ``input`` without its graph, or raise where a gather would not work."""
    check_codec(what, codec)
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    check_concatenated(what, target, source, comm.size)
    check_writable(what, target)
    return source


def check_scatter(
    what: str,
    comm: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    codec: Codec,
    op: ReduceOp,
) -> torch.Tensor:
    """Return ``input`` without its graph, or raise where a reduction would not work."""
    check_codec(what, codec)
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    check_concatenated(what, source, target, comm.size)
    check_writable(what, target)
    resolve_reduce_dtype(what, source.dtype, op, None)
    return source


def add_residual(what: str, source: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Return ``source`` and what was lost before, in a copy of the dtype of residuals."""
    wide = torch.float64 if source.dtype is torch.float64 else torch.float32
    total = source.to(wide, copy=True, memory_format=torch.contiguous_format)
    if residual is None:
        return total
    check_tensor(what, residual, source.device)
    if residual.shape != source.shape or residual.dtype is not wide:
        raise UsageError(
            f"{what}: residual must be {wide} {list(source.shape)} as the call before returned it, "
            f"got {residual.dtype} {list(residual.shape)}; None begins anew"
        )
    return total.add_(residual)
