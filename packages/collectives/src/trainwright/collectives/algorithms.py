"""Ring algorithms over point-to-point messages: they serve every communicator.

The ranks stand in a ring and each step sends one chunk to the next rank while one arrives from the
rank before, so that every link carries the same load. ``n`` is the number of ranks; the elements
are cut into ``n`` chunks by `chunk_bounds`. All functions have finished when they return, never
wait for a send before the matching receive has been started, and send nothing for empty chunks.

Source: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations
(Journal of Parallel and Distributed Computing, 2009).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from trainwright.collectives.arithmetic import accumulate
from trainwright.collectives.checks import (
    check_same_dtype,
    check_tensor,
    check_writable,
    resolve_reduce_dtype,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send


def chunk_bounds(numel: int, size: int) -> tuple[int, ...]:
    """Return the ``size + 1`` ends of ``size`` chunks of ``numel`` elements.

    Chunks differ by at most one element; the first ``numel % size`` are the longer ones. Chunk r,
    elements ``bounds[r]`` to ``bounds[r + 1]``, is what rank r reduces and contributes.
    """
    each, longer = divmod(numel, size)
    return tuple(rank * each + min(rank, longer) for rank in range(size + 1))


def ring_all_reduce(
    comm: Communicator,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Combine ``tensor`` over all ranks, in place; every rank gets the same bits.

    Args:
        comm: The ranks, in the order of the ring.
        tensor: Any shape and strides, the same shape and dtype on all ranks.
        op: How elements are combined.
        reduce_dtype: Dtype in which they are combined and partial results travel; None: at least
            float32 for floating-point tensors. The result is rounded to the tensor's dtype once.

    Raises:
        UsageError: ``op`` has no meaning for the dtype, or the tensor cannot be written to.

    Communicates:
        ``2 * (n - 1)`` steps. Each rank sends all chunks but its own in ``reduce_dtype``, then all
        but the next rank's in the tensor's dtype: ``2 * (n - 1) / n`` times the elements where
        ``n`` divides them.
    """
    what = "ring_all_reduce"
    source = check_tensor(what, tensor, comm.device)
    check_writable(what, source)
    wide = resolve_reduce_dtype(what, source.dtype, op, reduce_dtype)
    flat = source.contiguous().view(-1)
    chunks = _cut(flat, comm.size)
    chunks[comm.rank].copy_(_reduce_around(comm, chunks, op, wide))
    _gather_around(comm, chunks)
    if not source.is_contiguous():
        source.copy_(flat.view(source.shape))


def ring_reduce_scatter(
    comm: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Combine ``input`` over all ranks; rank r keeps chunk r of its flattened elements.

    Where the number of ranks divides the elements, this is ``Communicator.reduce_scatter``.

    Args:
        comm: The ranks, in the order of the ring.
        output: Contiguous, with as many elements as chunk r of ``input``; any shape.
        input: The same shape and dtype on all ranks; only read. ``output`` may be chunk r of it.
        op: How elements are combined.
        reduce_dtype: As in `ring_all_reduce`.

    Raises:
        UsageError: ``output`` has another size or dtype, or ``op`` has no meaning for the dtype.

    Communicates:
        ``n - 1`` steps; each rank sends all chunks but its own, in ``reduce_dtype``.
    """
    what = "ring_reduce_scatter"
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    wide = resolve_reduce_dtype(what, source.dtype, op, reduce_dtype)
    chunks = _cut(source.contiguous().view(-1), comm.size)
    _check_chunk(what, "output", target, chunks[comm.rank], comm)
    target.view(-1).copy_(_reduce_around(comm, chunks, op, wide))


def ring_all_gather(comm: Communicator, output: torch.Tensor, input: torch.Tensor) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Where the number of ranks divides the elements, this is ``Communicator.all_gather``.

    Args:
        comm: The ranks, in the order of the ring.
        output: Contiguous, of the same shape and dtype on all ranks.
        input: As many elements as chunk r of the flattened ``output``; may be that chunk itself.

    Raises:
        UsageError: A tensor has another size or dtype, or ``output`` is not contiguous.

    Communicates:
        ``n - 1`` steps; each rank sends all chunks but the next rank's.
    """
    what = "ring_all_gather"
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    _check_contiguous(what, "output", target)
    chunks = _cut(target.view(-1), comm.size)
    own = chunks[comm.rank]
    if source.numel() != own.numel():
        raise UsageError(_wrong_chunk(what, "input", source, own, comm))
    own.view(source.shape).copy_(source)
    _gather_around(comm, chunks)


def _reduce_around(
    comm: Communicator, chunks: Sequence[torch.Tensor], op: ReduceOp, dtype: torch.dtype
) -> torch.Tensor:
    """Return this rank's chunk combined over all ranks, in ``dtype``; ``chunks`` are only read.

    The partial result of chunk c starts at rank c + 1 and collects every rank's part on its way.
    """
    size = comm.size
    partial = chunks[(comm.rank - 1) % size].to(dtype)
    for step in range(size - 1):
        own = chunks[(comm.rank - 2 - step) % size]
        arriving = torch.empty_like(own, dtype=dtype)
        _pass_on(comm, partial, arriving)
        accumulate(arriving, own, op)
        partial = arriving
    if op is ReduceOp.AVG:
        partial = partial / size
    return partial


def _gather_around(comm: Communicator, chunks: Sequence[torch.Tensor]) -> None:
    """Fill all chunks from the ranks that own them; this rank's own is filled already."""
    size = comm.size
    for step in range(size - 1):
        leaving = chunks[(comm.rank - step) % size]
        _pass_on(comm, leaving, chunks[(comm.rank - 1 - step) % size])


def _pass_on(comm: Communicator, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
    """Send to the next rank and receive from the one before, together."""
    messages: list[Send | Recv] = []
    if leaving.numel() > 0:
        messages.append(Send(leaving, (comm.rank + 1) % comm.size))
    if arriving.numel() > 0:
        messages.append(Recv(arriving, (comm.rank - 1) % comm.size))
    if messages:
        comm.exchange(messages).wait()


def _cut(flat: torch.Tensor, size: int) -> list[torch.Tensor]:
    bounds = chunk_bounds(flat.numel(), size)
    return [flat[start:stop] for start, stop in itertools.pairwise(bounds)]


def _check_chunk(
    what: str, name: str, tensor: torch.Tensor, chunk: torch.Tensor, comm: Communicator
) -> None:
    _check_contiguous(what, name, tensor)
    if tensor.numel() != chunk.numel():
        raise UsageError(_wrong_chunk(what, name, tensor, chunk, comm))


def _check_contiguous(what: str, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise UsageError(f"{what}: {name} is written in order and must be contiguous")


def _wrong_chunk(
    what: str, name: str, tensor: torch.Tensor, chunk: torch.Tensor, comm: Communicator
) -> str:
    return (
        f"{what}: {name} of rank {comm.rank} must hold the {chunk.numel()} elements of its chunk "
        f"of {comm.size}, got {tensor.numel()}"
    )
