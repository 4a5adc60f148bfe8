"""Which positions of a sequence each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trainwright.sharding.context.memo import Memo
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut, Ranges

KINDS = ("zigzag", "contiguous")
"""The layouts there are."""


@attrs.frozen
class ContextLayout:
    """Which positions of a sequence each rank of the axis cp holds, as data.

    Causal attention gives late positions more work. ``zigzag`` cuts the sequence into twice as many
    chunks as ranks and gives rank r the chunks r and 2 * size - 1 - r, so that all have alike much.
    ``contiguous`` gives each rank one range, in time order. Chunks differ by one position where the
    length does not divide, the first ones have more; a rank may have none. A rank keeps its
    positions in increasing order.

    Positions, labels and documents follow the tokens through `split`. What depends on neighbours
    (labels shifted by one, documents, spans) is made from the whole sequence before that.

    Args:
        kind: ``"zigzag"`` or ``"contiguous"``.
        length: Positions of the whole sequence.
        size: Ranks.
        memo: What follows from the layout.

    Raises:
        ShardingError: The kind is unknown, the length negative, or there is no rank.
    """

    kind: str
    length: int
    size: int
    memo: Memo = attrs.field(factory=Memo, init=False, eq=False, repr=False)
    _cut: Cut = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ShardingError(
                f"kind of a context layout must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        if self.length < 0 or self.size < 1:
            raise ShardingError(
                f"a context layout needs length >= 0 and size >= 1, got length={self.length}, "
                f"size={self.size}"
            )
        object.__setattr__(self, "_cut", _cut_of(self.kind, self.length, self.size))

    @property
    def cut(self) -> Cut:
        """The ranges of positions by rank."""
        return self._cut

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many positions each rank has."""
        return self._cut.sizes

    @property
    def ranges(self) -> tuple[Ranges, ...]:
        """By rank, its ranges (start, stop) of positions, increasing."""
        return self._cut.ranges

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the positions that a rank holds, in its order: int64 [S_local].

        Raises:
            ShardingError: There is no such rank.
        """
        self._check_rank(rank)
        return self._cut.take(torch.arange(self.length, device=device), 0, rank)

    def split(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return a rank's part of a whole sequence; gradients pass.

        Args:
            tensor: Has the whole sequence along ``dim``.
            dim: Counts from the end where negative.
            rank: The rank.

        Raises:
            ShardingError: ``dim`` does not have the layout's length, or there is no such rank.
        """
        self._check_rank(rank)
        return self._cut.take(tensor, dim, rank)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the whole sequence, in time order, of all ranks' parts; gradients pass.

        Raises:
            ShardingError: A part is missing or does not have its rank's size.
        """
        return self._cut.join(parts, dim)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ShardingError(f"rank must be in 0..{self.size - 1} of {self}, got {rank}")


def _cut_of(kind: str, length: int, size: int) -> Cut:
    if kind == "contiguous":
        return Cut.balanced(length, size)
    chunks = [ranges or ((0, 0),) for ranges in Cut.balanced(length, 2 * size).ranges]
    return Cut(length, [(*chunks[rank], *chunks[-1 - rank]) for rank in range(size)])
