"""Collectives that autograd can go through, named by what they do to a tensor's placement.

Two conventions are in use, and every function says which it follows.

*Placements.* A tensor is *replicated* (equal on all ranks), *sharded* along a dim (each rank holds
its part) or *partial* (the true value is the sum over the ranks), and so is its gradient: the loss
is one number, and a gradient is the gradient of that one loss. The gradient of a replicated or
partial tensor is replicated, that of a sharded one is sharded; where a rank knows only its term of
the gradient of a replicated tensor, that gradient is partial. ``replicate_to_partial`` stands where
such terms begin, ``partial_to_replicate`` where partial values end.

*True adjoints.* The total loss is the sum over ranks of each rank's loss; the backward is the exact
adjoint of the forward under it, whatever the tensors mean.

Rules for all of them: at size 1 nothing is communicated and the input itself is returned. Every
rank takes part in the backward, so every rank's loss must reach the result, if only with a zero
gradient. Backward is differentiable again. Reductions are done in at least float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from .errors import UsageError
from .linear_maps import (
    apply_linear,
    copy_from_root,
    exchange_rows,
    gather_along,
    own_slice,
    same,
    sum_over_ranks,
    sum_own_slice,
    sum_to_root,
)
from .protocol import Communicator


def partial_to_replicate(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Sum a partial tensor over the ranks; the gradient passes unchanged (placements).

    Communicates:
        Forward one all-reduce of the tensor; backward nothing.
    """
    if comm.size == 1:
        return tensor
    return apply_linear(tensor, functools.partial(sum_over_ranks, comm=comm), same)


def replicate_to_partial(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Pass a replicated tensor on to work whose gradients are terms of a sum (placements).

    Returns:
        The same values; in the backward the ranks' gradients are summed.

    Communicates:
        Forward nothing; backward one all-reduce of the gradient.
    """
    if comm.size == 1:
        return tensor
    return apply_linear(tensor, same, functools.partial(sum_over_ranks, comm=comm))


def shard_to_replicate(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Concatenate the ranks' shards along ``dim``; the gradient is cut again (placements).

    Args:
        tensor: This rank's shard; of the same shape on every rank.
        comm: The ranks that hold shards, in the order of the shards.
        dim: The dim that is sharded; counts from the end where negative.

    Communicates:
        Forward one all-gather; backward nothing.
    """
    at = _dim_of(tensor, dim)
    if comm.size == 1:
        return tensor
    gather = functools.partial(gather_along, comm=comm, dim=at)
    return apply_linear(tensor, gather, functools.partial(own_slice, comm=comm, dim=at))


def replicate_to_shard(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Keep this rank's part of ``dim``; the parts' gradients are gathered (placements).

    Raises:
        UsageError: The size of ``dim`` is not a multiple of the number of ranks.

    Communicates:
        Forward nothing; backward one all-gather.
    """
    at = _divided_dim(tensor, comm, dim)
    if comm.size == 1:
        return tensor
    cut = functools.partial(own_slice, comm=comm, dim=at)
    return apply_linear(tensor, cut, functools.partial(gather_along, comm=comm, dim=at))


def partial_to_shard(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Sum a partial tensor and keep this rank's part of ``dim`` (placements and true adjoint).

    Raises:
        UsageError: The size of ``dim`` is not a multiple of the number of ranks.

    Communicates:
        Forward one reduce-scatter; backward one all-gather of the gradient.
    """
    at = _divided_dim(tensor, comm, dim)
    if comm.size == 1:
        return tensor
    scatter = functools.partial(sum_own_slice, comm=comm, dim=at)
    return apply_linear(tensor, scatter, functools.partial(gather_along, comm=comm, dim=at))


def shard_to_partial(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Concatenate shards for work whose gradients are terms of a sum (placements, true adjoint).

    Returns:
        The whole tensor on every rank; in the backward the ranks' gradients are summed and cut.

    Communicates:
        Forward one all-gather; backward one reduce-scatter of the gradient.
    """
    at = _dim_of(tensor, dim)
    if comm.size == 1:
        return tensor
    gather = functools.partial(gather_along, comm=comm, dim=at)
    return apply_linear(tensor, gather, functools.partial(sum_own_slice, comm=comm, dim=at))


def all_reduce(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Sum over the ranks; the gradients are summed over the ranks too (true adjoint).

    Communicates:
        One all-reduce forward and one backward.
    """
    if comm.size == 1:
        return tensor
    total = functools.partial(sum_over_ranks, comm=comm)
    return apply_linear(tensor, total, total)


def all_gather(tensor: torch.Tensor, comm: Communicator, dim: int = 0) -> torch.Tensor:
    """Concatenate along ``dim``; the gradients are summed and cut (true adjoint).

    Communicates:
        Forward one all-gather; backward one reduce-scatter.
    """
    return shard_to_partial(tensor, comm, dim)


def reduce_scatter(tensor: torch.Tensor, comm: Communicator, dim: int = 0) -> torch.Tensor:
    """Sum and keep this rank's part of ``dim``; the gradients are gathered (true adjoint).

    Raises:
        UsageError: The size of ``dim`` is not a multiple of the number of ranks.

    Communicates:
        Forward one reduce-scatter; backward one all-gather.
    """
    return partial_to_shard(tensor, comm, dim)


def broadcast(tensor: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    """Give every rank root's values; root's gradient is the sum over ranks (true adjoint).

    Args:
        tensor: Root's values; on the other ranks only shape, dtype and device count.
        comm: The ranks that share the values.
        root: Rank within ``comm``.

    Returns:
        Root's values on every rank. They require a gradient on every rank where any may (floating
        point, gradients enabled), so that the backward meets on all; the gradient is zero on the
        ranks that are not root.

    Raises:
        UsageError: ``root`` is not a rank of ``comm``.

    Communicates:
        Forward one broadcast; backward one reduce to root.
    """
    if not 0 <= root < comm.size:
        raise UsageError(f"root must be a rank of {comm.name!r}, 0..{comm.size - 1}, got {root}")
    if comm.size == 1:
        return tensor
    copy = functools.partial(copy_from_root, comm=comm, root=root)
    source = tensor
    may_differ = tensor.is_floating_point() or tensor.is_complex()
    if may_differ and torch.is_grad_enabled() and not tensor.requires_grad:
        source = tensor.detach().requires_grad_()
    return apply_linear(source, copy, functools.partial(sum_to_root, comm=comm, root=root))


def all_to_all(
    tensor: torch.Tensor,
    comm: Communicator,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Send part q of dim 0 to rank q; the gradients travel back (placements, true adjoint).

    Args:
        tensor: Parts for rank 0, 1, … one after the other along dim 0.
        comm: The ranks that exchange parts.
        output_splits: Rows received from each rank; None: equal parts, as many as are sent.
        input_splits: Rows sent to each rank; None: equal parts.

    Returns:
        The received parts in rank order, ``[sum(output_splits), ...]``.

    Raises:
        UsageError: Splits do not fit the number of ranks or of rows.

    Communicates:
        One all-to-all forward and one, with the splits exchanged, backward.
    """
    rows = tensor.shape[_dim_of(tensor, 0)]
    sent = _splits("input_splits", input_splits, comm, rows)
    received = _splits("output_splits", output_splits, comm, rows)
    if sum(sent) != rows:
        raise UsageError(f"input_splits={sent} must sum to the {rows} rows of the tensor")
    if comm.size == 1:
        if received != sent:
            raise UsageError(f"one rank receives what it sends: {received} is not {sent}")
        return tensor
    forth = functools.partial(exchange_rows, comm=comm, received=received, sent=sent)
    back = functools.partial(exchange_rows, comm=comm, received=sent, sent=received)
    return apply_linear(tensor, forth, back)


def _dim_of(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise UsageError(f"dim={dim} is not a dim of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.ndim


def _divided_dim(tensor: torch.Tensor, comm: Communicator, dim: int) -> int:
    at = _dim_of(tensor, dim)
    size = tensor.shape[at]
    if size % comm.size != 0:
        below = size - size % comm.size
        raise UsageError(
            f"dim {dim} of shape {tuple(tensor.shape)} cannot be cut over the {comm.size} ranks "
            f"of {comm.name!r}: {size} is not a multiple; {below} or {below + comm.size} would be"
        )
    return at


def _splits(
    name: str, splits: Sequence[int] | None, comm: Communicator, rows: int
) -> tuple[int, ...]:
    if splits is None:
        if rows % comm.size != 0:
            raise UsageError(
                f"{rows} rows cannot be cut equally over {comm.size} ranks: pass {name}"
            )
        return (rows // comm.size,) * comm.size
    if len(splits) != comm.size or any(rows_of < 0 for rows_of in splits):
        raise UsageError(
            f"{name} must hold one number of rows >= 0 for each of {comm.size} ranks, "
            f"got {tuple(splits)}"
        )
    return tuple(splits)
