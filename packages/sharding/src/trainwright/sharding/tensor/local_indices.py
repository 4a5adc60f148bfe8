"""The indices of a cut vocabulary that one rank holds, and where it holds them."""

from __future__ import annotations

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut


@attrs.frozen
class LocalIndices:
    """The indices of a vocabulary on this rank, in the order in which it keeps them.

    Args:
        size: Of the whole vocabulary without padding.
        ranges: The ranges (start, stop) of indices here; padding is left out.
        counts: How many indices each rank holds, padding left out.
    """

    size: int
    ranges: tuple[tuple[int, int], ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, cut: Cut, tp: Communicator, vocab_size: int | None = None) -> LocalIndices:
        """Return what this rank holds of the first ``vocab_size`` indices of a cut.

        Raises:
            ShardingError: The cut is not one over these ranks in which each index lies on one of
                them, it has fewer than ``vocab_size`` indices, or a rank keeps padding before an
                index of the vocabulary.
        """
        if cut.num_ranks != tp.size:
            raise ShardingError(f"the vocabulary is cut over {cut.num_ranks} ranks, tp={tp.size}")
        if not cut.is_partition:
            raise ShardingError(
                f"each index of a vocabulary must lie on exactly one rank, got {cut}"
            )
        size = cut.size if vocab_size is None else vocab_size
        if not 0 <= size <= cut.size:
            raise ShardingError(
                f"vocab_size={size} must be in 0..{cut.size}, the size of the padded vocabulary"
            )
        by_rank = [_without_padding(cut, rank, size) for rank in range(tp.size)]
        counts = tuple(sum(b - a for a, b in ranges) for ranges in by_rank)
        return cls(size, by_rank[tp.rank], counts)

    @property
    def count(self) -> int:
        """How many indices this rank holds, padding left out; they come first."""
        return sum(stop - start for start, stop in self.ranges)

    def place_of(self, index: int) -> int | None:
        """Return where one index lies on this rank, None if it does not."""
        kept = 0
        for start, stop in self.ranges:
            if start <= index < stop:
                return kept + index - start
            kept += stop - start
        return None

    def find(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each index lies on this rank, 0 if it does not, and whether it does."""
        # Differences of narrow or unsigned labels would wrap around.
        indices = indices.long()
        if len(self.ranges) == 1:
            ((start, stop),) = self.ranges
            place = indices - start
            here = (place >= 0) & (place < stop - start)
            return place.masked_fill_(~here, 0), here
        place = torch.zeros_like(indices)
        here = torch.zeros_like(indices, dtype=torch.bool)
        kept = 0
        for start, stop in self.ranges:
            inside = (indices >= start) & (indices < stop)
            place = torch.where(inside, indices - (start - kept), place)
            here |= inside
            kept += stop - start
        return place, here

    def find_or_refuse(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return as `find`, but an index of no rank is left out of range for the lookup to refuse.

        So it stops at an assertion of the device, where reading indices back would stall it.
        """
        place, here = self.find(indices)
        known = (indices >= 0) & (indices < self.size)
        return torch.where(known, place, self.count), here


def _without_padding(cut: Cut, rank: int, size: int) -> tuple[tuple[int, int], ...]:
    kept: list[tuple[int, int]] = []
    padding = False
    for start, stop in cut.ranges[rank]:
        if padding and start < size:
            raise ShardingError(
                f"rank {rank} keeps {cut.ranges[rank]}: padding (from {size} on) must come last"
            )
        padding = padding or stop > size
        if start < size:
            kept.append((start, min(stop, size)))
    return tuple(kept)
