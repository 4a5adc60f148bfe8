"""Comparing now and then what ranks have called, at next to no cost."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from trainwright.collectives.headers import HASHES
from trainwright.collectives.histories import History, compare_histories
from trainwright.collectives.protocol import Communicator, Work
from trainwright.collectives.recorded_work import Block


@attrs.frozen(eq=False)
class _Sample:
    """Sums over the ranks that are under way, and this rank's part of them."""

    totals: torch.Tensor
    mine: int
    work: Work
    block: Block | None

    def is_alike(self, size: int) -> bool:
        """Wait, and return whether all ranks had called the same."""
        self.work.wait()
        return int(self.totals[0]) == self.mine * size

    def is_outside_blocks(self) -> bool:
        """Wait, and return whether no rank was in a block."""
        self.work.wait()
        return not int(self.totals[1])


class Sampler:
    """Adds up the digests of all ranks after every so many collectives.

    A sum is looked at when the next one is due, so that only ranks wait that are so many
    collectives ahead. Ranks coalesce as they like: inside a ``coalesce`` block the sum is part of
    the block, at the same place among the collectives as on the other ranks, and looked at later.
    Since nothing can be waited for inside a block, each sum also tells whether some rank is in one,
    and a difference is told at the first sum at which no rank is.

    Args:
        comm: The communicator whose collectives are compared; sums go over it as well.
        every: After how many collectives.

    Communicates:
        An all-reduce of 16 bytes each time; where ranks differ, their records.
    """

    def __init__(self, comm: Communicator, every: int) -> None:
        self._comm = comm
        self._every = every
        self._samples: list[_Sample] = []
        self._num_compared = 0
        self._is_different = False

    def look(
        self, history: Callable[[], History], count: int, digest: int, block: Block | None
    ) -> None:
        """Compare before a collective if it is time for it.

        Args:
            history: Returns what this rank has called.
            count: How many collectives it has called.
            digest: Of these.
            block: The ``coalesce`` block that is open.

        Raises:
            UsageError: Ranks called different things; the same text on every rank.
        """
        if count % self._every or count == self._num_compared:
            return
        self._num_compared = count
        comm = self._comm
        mine = digest % HASHES
        totals = torch.tensor([mine, int(block is not None)], device=comm.device)
        sample = _Sample(totals, mine, comm.all_reduce(totals), block)
        self._look_back(block)
        self._samples.append(sample)
        if not self._is_different or block is not None or not sample.is_outside_blocks():
            return
        self._samples = []
        self._is_different = False
        compare_histories(comm, history(), None)

    def _look_back(self, block: Block | None) -> None:
        """Look at the sums before, but for those that are part of the block that is open."""
        samples, self._samples = self._samples, []
        for sample in samples:
            if block is not None and sample.block is block:
                self._samples.append(sample)
            elif sample.block is None or not sample.block.is_open:  # else an error ended the block
                self._is_different |= not sample.is_alike(self._comm.size)
