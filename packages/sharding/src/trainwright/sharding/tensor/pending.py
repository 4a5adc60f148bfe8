"""Collectives under way: started early, waited for when the result is needed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.tensor.parts import pad_to

Pending = Callable[[], torch.Tensor]
"""Waits for the operation and returns its result; called once."""


def start_sum(terms: torch.Tensor, comm: Communicator) -> Pending:
    """Start to sum a tensor over the ranks, in place."""
    terms = terms.contiguous()
    work = comm.all_reduce(terms)

    def finish() -> torch.Tensor:
        work.wait()
        return terms

    return finish


def start_gather(part: torch.Tensor, comm: Communicator, dim: int, length: int) -> Pending:
    """Start to gather what `Cut.uneven` of ``length`` gives the ranks of ``dim``."""
    most = -(-length // comm.size)
    padded = pad_to(part.detach(), dim, most).contiguous()
    rows, *rest = padded.shape
    stacked = padded.new_empty((comm.size * rows, *rest))
    work = comm.all_gather(stacked, padded)

    def finish() -> torch.Tensor:
        work.wait()
        if dim == 0:
            return stacked.narrow(0, 0, length)
        by_rank = stacked.view(comm.size, *padded.shape).movedim(0, dim)
        shape = (*padded.shape[:dim], comm.size * most, *padded.shape[dim + 1 :])
        return by_rank.reshape(shape).narrow(dim, 0, length)

    return finish


def start_sum_of_parts(terms: torch.Tensor, comm: Communicator, dim: int) -> Pending:
    """Start to sum a tensor over the ranks, of which each keeps its part by `Cut.uneven`."""
    length = terms.shape[dim]
    most = -(-length // comm.size)
    own = max(0, min(most, length - comm.rank * most))
    padded = pad_to(terms, dim, comm.size * most)
    shape = (*terms.shape[:dim], comm.size, most, *terms.shape[dim + 1 :])
    parts = padded.reshape(shape).movedim(dim, 0).contiguous()
    kept = parts.new_empty(parts.shape[1:])
    work = comm.reduce_scatter(kept, parts.flatten(0, 1))

    def finish() -> torch.Tensor:
        work.wait()
        return kept.narrow(dim, 0, own)

    return finish
