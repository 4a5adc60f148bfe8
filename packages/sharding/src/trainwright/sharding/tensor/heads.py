"""How attention heads are shared out over ranks, and where their rows lie in projections."""

# A group is one key/value head and the query heads that it serves.

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut, Ranges


@attrs.frozen
class HeadLayout:
    """Which query heads each rank computes, and which key/value heads they need.

    Query heads are shared out in order; where the numbers do not divide, the first ranks have one
    more. A key/value head lies with its query heads where whole groups fall to each rank.
    Otherwise (fewer key/value heads than ranks, or numbers that do not divide) the key/value
    projection stays whole on every rank; each computes only the rows that its own query heads need,
    so that the projection's gradient is `Partial` on the axis.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key/value heads; each serves the same number of neighbouring query heads.
        head_dim: Rows of one head in a projection.
        ranks: Tensor-parallel ranks.

    Raises:
        ShardingError: A number is not positive, the query heads are not a multiple of the key/value
            heads, or there are fewer of them than ranks.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    ranks: int

    def __attrs_post_init__(self) -> None:
        if min(self.num_heads, self.num_kv_heads, self.head_dim, self.ranks) < 1:
            raise ShardingError(f"heads, their size and their ranks are positive, got {self}")
        if self.num_heads % self.num_kv_heads:
            raise ShardingError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.num_heads < self.ranks:
            raise ShardingError(
                f"num_heads={self.num_heads} cannot be shared out over tp={self.ranks}: every rank "
                f"needs a query head, so tp is at most {self.num_heads}"
            )

    @property
    def kv_is_replicated(self) -> bool:
        """Whether every rank holds the whole key/value projection."""
        shared = self.num_heads != self.num_kv_heads
        return shared and self.num_kv_heads % self.ranks != 0

    def num_local(self, rank: int) -> int:
        """Return how many query heads a rank computes."""
        return self._heads.numel(rank)

    def num_local_kv(self, rank: int) -> int:
        """Return how many key/value heads a rank computes."""
        return len(self.repeats(rank))

    def kv_of(self, rank: int) -> tuple[int, ...]:
        """Return the key/value head, counted in the whole layer, of each query head of a rank."""
        return tuple(head // self._group for head in self._heads.indices(rank))

    def repeats(self, rank: int) -> tuple[int, ...]:
        """Return how many of its query heads each key/value head that a rank computes serves.

        Where the numbers differ, key/value heads are repeated by them before attention, as
        ``torch.repeat_interleave`` does; where they are one number, it is the rank's group size.
        """
        return tuple(len(list(same)) for _, same in itertools.groupby(self.kv_of(rank)))

    def query_cut(self) -> Cut:
        """Return the cut of the query projection's rows."""
        return self._heads.scaled(self.head_dim)

    def kv_cut(self) -> Cut:
        """Return the cut of the key or value projection's rows as they are held."""
        if self.kv_is_replicated:
            return Cut.whole(self.num_kv_heads * self.head_dim, self.ranks)
        return self.kv_used_cut()

    def kv_used_cut(self) -> Cut:
        """Return which of the key or value projection's rows each rank computes.

        Several ranks may compute a row; `KeyValueLinear` takes this cut.
        """
        used = [[(kv, kv + 1) for kv in self._used(rank)] for rank in range(self.ranks)]
        return Cut(self.num_kv_heads, used).scaled(self.head_dim)

    def fused_by_block(self) -> Cut:
        """Return which rows of a fused [Q; K; V] projection each rank computes, in that order."""
        return Cut.joined(self.query_cut(), self.kv_used_cut(), self.kv_used_cut())

    def fused_by_group(self) -> Cut:
        """Return which rows a rank computes of a projection fused [q.. k v] group after group."""
        size = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        ranges = [
            [rows for _, rows in self._group_rows(rank, local=False)] for rank in range(self.ranks)
        ]
        return Cut(size, ranges)

    def parts_by_block(self, rank: int) -> Cut:
        """Return which of a rank's rows under `fused_by_block` are q, k and v.

        Returns:
            A cut over three: ``take(rows, dim, 0)`` are the queries, 1 the keys, 2 the values, and
            ``join`` fuses them again. With ``ranks=1`` this is the layout of the whole projection.
        """
        kv = self.num_local_kv(rank) * self.head_dim
        return Cut.of_sizes([self.num_local(rank) * self.head_dim, kv, kv])

    def parts_by_group(self, rank: int) -> Cut:
        """Return which of a rank's rows under `fused_by_group` are q, k and v.

        Returns:
            As `parts_by_block`.
        """
        rows = list(self._group_rows(rank, local=True))
        parts: list[Ranges] = [
            tuple(ends for part, ends in rows if part == wanted) for wanted in range(3)
        ]
        return Cut(rows[-1][1][1], parts)

    @property
    def _group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def _heads(self) -> Cut:
        return Cut.balanced(self.num_heads, self.ranks)

    def _used(self, rank: int) -> list[int]:
        return [kv for kv, _ in itertools.groupby(self.kv_of(rank))]

    def _group_rows(self, rank: int, *, local: bool) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield (0 for q, 1 for k, 2 for v; the rows) of what a rank computes, in order."""
        at = 0
        heads = self._heads.indices(rank)
        for kv, repeats in zip(self._used(rank), self.repeats(rank), strict=True):
            base = kv * (self._group + 2)
            first = max(heads[0] - kv * self._group, 0)
            whole = ((first, repeats), (self._group, 1), (self._group + 1, 1))
            for part, (start, count) in enumerate(whole):
                head = at if local else base + start
                yield part, (head * self.head_dim, (head + count) * self.head_dim)
                at += count
