"""Linear maps over the ranks' tensors, and the autograd function that joins two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .protocol import Communicator

LinearMap = Callable[[torch.Tensor], torch.Tensor]


def apply_linear(tensor: torch.Tensor, forth: LinearMap, back: LinearMap) -> torch.Tensor:
    """Return ``forth(tensor)`` with ``back`` as its backward, which has ``forth`` as its own."""
    if not torch.is_grad_enabled():
        # Also in a plain backward. There `same` must give autograd the very gradient it got: of a
        # fresh view of it autograd would not see that others hold it, and take it as a .grad.
        return forth(tensor)
    return cast(torch.Tensor, _Linear.apply(tensor, forth, back))  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forth: LinearMap, back: LinearMap) -> torch.Tensor:
        ctx.maps = (forth, back)
        return forth(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # An undefined gradient arrives as zeros: the peers wait for this rank's part.
        forth, back = ctx.maps
        return apply_linear(gradient, back, forth), None, None


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself; autograd makes a view of it where it is a result."""
    return tensor


def sum_over_ranks(tensor: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the sum over the ranks on every rank."""
    # A copy: autograd hands the same gradient tensor to several branches.
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total).wait()
    return total


def gather_along(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Return the ranks' tensors concatenated along ``dim``, contiguous, on every rank."""
    rows, *rest = tensor.shape
    stacked = tensor.new_empty((comm.size * rows, *rest))
    comm.all_gather(stacked, tensor.contiguous()).wait()
    if dim == 0:
        return stacked
    whole = (*tensor.shape[:dim], comm.size * tensor.shape[dim], *tensor.shape[dim + 1 :])
    return stacked.view(comm.size, *tensor.shape).movedim(0, dim).reshape(whole)


def own_slice(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Return a copy of this rank's equal part of ``dim``."""
    # A copy: autograd would take two views of one gradient as the .grad of two parameters.
    size = tensor.shape[dim] // comm.size
    part = tensor.narrow(dim, comm.rank * size, size)
    return part.clone(memory_format=torch.contiguous_format)


def sum_own_slice(tensor: torch.Tensor, comm: Communicator, dim: int) -> torch.Tensor:
    """Return this rank's equal part along ``dim`` of the sum over the ranks."""
    before, size, after = tensor.shape[:dim], tensor.shape[dim], tensor.shape[dim + 1 :]
    split = tensor.reshape(*before, comm.size, size // comm.size, *after)
    parts = split.movedim(dim, 0).contiguous()
    kept = tensor.new_empty(parts.shape[1:])
    comm.reduce_scatter(kept, parts.flatten(0, 1)).wait()
    return kept


def copy_from_root(tensor: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    """Return root's tensor on every rank."""
    if comm.rank == root:
        copy = tensor.clone(memory_format=torch.contiguous_format)
    else:
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    comm.broadcast(copy, root).wait()
    return copy


def sum_to_root(tensor: torch.Tensor, comm: Communicator, root: int) -> torch.Tensor:
    """Return the sum over the ranks on root, zeros elsewhere."""
    if comm.rank != root:
        comm.reduce(tensor.contiguous(), root).wait()
        return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.reduce(total, root).wait()
    return total


def exchange_rows(
    tensor: torch.Tensor, comm: Communicator, received: Sequence[int], sent: Sequence[int]
) -> torch.Tensor:
    """Return the rows of all ranks that are for this one, in rank order."""
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    comm.all_to_all(output, tensor.contiguous(), received, sent).wait()
    return output
