"""Collectives under way: started early, waited for when the result is needed."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from trainwright.collectives import Communicator, Work
from trainwright.sharding.tensor.parts import pad_to


@attrs.frozen(eq=False)
class Pending:
    """An operation under way.

    Args:
        work: What was started.
        buffers: What it reads and writes, held until it is over.
        result: Makes the result of the buffers.
    """

    work: Work
    buffers: tuple[torch.Tensor, ...]
    result: Callable[[], torch.Tensor]

    def finish(self) -> torch.Tensor:
        """Wait for the operation and return its result."""
        self.work.wait()
        return self.result()


def start_sum(terms: torch.Tensor, comm: Communicator) -> Pending:
    """Start to sum a tensor over the ranks, in place."""
    total = terms.contiguous()
    return Pending(comm.all_reduce(total), (total,), lambda: total)


def start_gather(part: torch.Tensor, comm: Communicator, dim: int, length: int) -> Pending:
    """Start to gather what `Cut.uneven` of ``length`` gives the ranks of ``dim``."""
    most = -(-length // comm.size)
    padded = pad_to(part.detach(), dim, most).contiguous()
    rows, *rest = padded.shape
    stacked = padded.new_empty((comm.size * rows, *rest))

    def whole() -> torch.Tensor:
        if dim == 0:
            return stacked.narrow(0, 0, length)
        by_rank = stacked.view(comm.size, *padded.shape).movedim(0, dim)
        shape = (*padded.shape[:dim], comm.size * most, *padded.shape[dim + 1 :])
        return by_rank.reshape(shape).narrow(dim, 0, length)

    return Pending(comm.all_gather(stacked, padded), (stacked, padded), whole)


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
    return Pending(work, (kept, parts), lambda: kept.narrow(dim, 0, own))
