"""Memory where a communicator reads and writes it without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from trainwright.collectives.protocol import Communicator


@runtime_checkable
class Placing(Protocol):
    """A communicator that gives out memory which its operations reach directly."""

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a contiguous tensor without values, new memory each time.

        Args:
            shape: lengths of the dims.
            dtype: of the elements.
        """
        ...


def empty_on(
    comm: Communicator, shape: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return a tensor without values for what travels on ``comm``.

    Where the communicator is `Placing` the tensor lives where its operations need no copy; any
    other tensor is as right there, only slower. Else it is ordinary memory on ``comm.device``.
    Such memory may be unfit for other things: a storage in shared memory cannot be resized, and a
    forked process shares it.

    Args:
        comm: what will carry it.
        shape: lengths of the dims.
        dtype: of the elements.

    Raises:
        CollectiveError: the communicator's memory has no room; for shared memory that is twice the
            machine's.
    """
    if isinstance(comm, Placing):
        return comm.empty(shape, dtype=dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=comm.device)


class PlacingInside:
    """The part of a communicator around another one that gives out the inner one's memory."""

    _comm: Communicator

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """See `empty_on`, of the communicator inside."""
        return empty_on(self._comm, shape, dtype=dtype)
