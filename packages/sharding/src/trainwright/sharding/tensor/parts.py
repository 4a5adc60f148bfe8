"""Activations of which each rank has the indices of a cut: from and to whole tensors.

`differentiable` has these for equal parts; here parts are padded to equal ones where they differ,
so that one collective carries them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut

_Exchange = Callable[[torch.Tensor, Communicator, int], torch.Tensor]


def join_parts(part: torch.Tensor, comm: Communicator, cut: Cut, dim: int) -> torch.Tensor:
    """Make the whole tensor of all ranks' parts; each rank gets its part of the gradient.

    Args:
        part: This rank's indices of ``dim``.
        comm: The ranks of the cut.
        cut: Which indices each of them has.
        dim: The dim that is cut; counts from the end where negative.

    Raises:
        ShardingError: The part does not have this rank's size.

    Communicates:
        Forward one all-gather of parts as large as the largest; backward nothing.
    """
    return _join(part, comm, cut, dim, differentiable.shard_to_replicate)


def join_parts_for_terms(
    part: torch.Tensor, comm: Communicator, cut: Cut, dim: int
) -> torch.Tensor:
    """Make the whole tensor for work whose gradients are terms of a sum.

    Args:
        part: As in `join_parts`.
        comm: As in `join_parts`.
        cut: As in `join_parts`.
        dim: As in `join_parts`.

    Communicates:
        Forward one all-gather, backward one reduce-scatter, of parts as large as the largest.
    """
    return _join(part, comm, cut, dim, differentiable.shard_to_partial)


def take_part(whole: torch.Tensor, comm: Communicator, cut: Cut, dim: int) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor; the parts' gradients are gathered.

    Args:
        whole: The same tensor on every rank.
        comm: As in `join_parts`.
        cut: As in `join_parts`.
        dim: As in `join_parts`.

    Raises:
        ShardingError: The dim does not have the size of the cut.

    Communicates:
        Forward nothing; backward one all-gather of parts as large as the largest.
    """
    return _take(whole, comm, cut, dim, differentiable.replicate_to_shard)


def sum_part(terms: torch.Tensor, comm: Communicator, cut: Cut, dim: int) -> torch.Tensor:
    """Sum the ranks' tensors and keep this rank's part of the sum.

    Args:
        terms: This rank's term of the whole tensor.
        comm: As in `join_parts`.
        cut: As in `join_parts`.
        dim: As in `join_parts`.

    Raises:
        ShardingError: The dim does not have the size of the cut.

    Communicates:
        Forward one reduce-scatter, backward one all-gather, of parts as large as the largest.
    """
    return _take(terms, comm, cut, dim, differentiable.partial_to_shard)


def is_plain(cut: Cut) -> bool:
    """Return whether the cut is into equal parts, rank after rank."""
    sizes = cut.sizes
    return sizes[0] * len(sizes) == cut.size and cut == Cut.uneven(cut.size, len(sizes))


def pad_to(part: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return a tensor with zeros after its own elements of ``dim``, which then has ``size``."""
    missing = size - part.shape[dim]
    after = part.ndim - 1 - dim % part.ndim
    return F.pad(part, [0, 0] * after + [0, missing]) if missing else part


def check_part(part: torch.Tensor, comm: Communicator, cut: Cut, dim: int) -> None:
    """Raise unless a part has the size that the cut gives this rank."""
    if cut.num_ranks != comm.size:
        raise ShardingError(f"a cut over {cut.num_ranks} ranks cannot serve {comm.size} ranks")
    if part.shape[dim] != cut.numel(comm.rank):
        raise ShardingError(
            f"rank {comm.rank} of {comm.size} has {cut.numel(comm.rank)} of {cut.size} indices of "
            f"dim {dim}, got a tensor of shape {tuple(part.shape)}"
        )


def _join(
    part: torch.Tensor, comm: Communicator, cut: Cut, dim: int, gather: _Exchange
) -> torch.Tensor:
    check_part(part, comm, cut, dim)
    if comm.size == 1 and cut.is_whole:
        return part
    if is_plain(cut):
        return gather(part, comm, dim)
    largest = max(cut.sizes)
    padded = gather(pad_to(part, dim, largest), comm, dim)
    slots = torch.split(padded, largest, dim) if largest else (padded,) * comm.size
    parts = [slot.narrow(dim, 0, n) for slot, n in zip(slots, cut.sizes, strict=True)]
    return cut.join(parts, dim)


def _take(
    whole: torch.Tensor, comm: Communicator, cut: Cut, dim: int, scatter: _Exchange
) -> torch.Tensor:
    if cut.num_ranks != comm.size:
        raise ShardingError(f"a cut over {cut.num_ranks} ranks cannot serve {comm.size} ranks")
    if comm.size == 1 and cut.is_whole:
        return whole
    if is_plain(cut):
        return scatter(whole, comm, dim)
    largest = max(cut.sizes)
    parts = [pad_to(cut.take(whole, dim, rank), dim, largest) for rank in range(comm.size)]
    own = scatter(torch.cat(parts, dim), comm, dim)
    return own.narrow(dim, 0, cut.numel(comm.rank))
