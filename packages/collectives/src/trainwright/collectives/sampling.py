"""Comparing now and then what ranks have called, at next to no cost."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from trainwright.collectives.headers import HASHES
from trainwright.collectives.histories import History, compare_histories
from trainwright.collectives.protocol import Communicator, Work


@attrs.frozen(eq=False)
class _Sample:
    """A sum over the ranks that is under way, and this rank's part of it."""

    total: torch.Tensor
    mine: int
    work: Work


class Sampler:
    """Adds up the digests of all ranks after every so many collectives.

    A sum is looked at when the next one is due, so that only ranks wait that are so many
    collectives ahead.

    Args:
        comm: The communicator whose collectives are compared; sums go over it as well.
        every: After how many collectives.

    Communicates:
        An all-reduce of 8 bytes each time; where ranks differ, their records.
    """

    def __init__(self, comm: Communicator, every: int) -> None:
        self._comm = comm
        self._every = every
        self._sample: _Sample | None = None
        self._num_compared = 0

    def look(self, history: Callable[[], History], count: int, digest: int) -> None:
        """Compare before a collective if it is time for it; no ``coalesce`` block may be open.

        Raises:
            UsageError: Ranks called different things; the same text on every rank.
        """
        if count % self._every or count == self._num_compared:
            return
        self._num_compared = count
        comm = self._comm
        last = self._sample
        self._sample = None
        if last is not None:
            last.work.wait()
            if int(last.total) != last.mine * comm.size:
                compare_histories(comm, history(), None)
        mine = digest % HASHES
        total = torch.tensor(mine, device=comm.device)
        self._sample = _Sample(total, mine, comm.all_reduce(total))
