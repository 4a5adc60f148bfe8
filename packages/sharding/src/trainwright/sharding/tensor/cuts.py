"""Which indices of one dimension each rank of an axis holds, as data."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch

from trainwright.collectives import Box
from trainwright.sharding.divisions import check_divides
from trainwright.sharding.errors import ShardingError

Ranges = tuple[tuple[int, int], ...]


def _joined_where_they_meet(ranges: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges without empty ones, neighbours as one: equal cuts compare equal."""
    last: tuple[int, int] | None = None
    for first, end in ranges:
        start, stop = operator.index(first), operator.index(end)
        if start == stop:
            continue
        if last is not None and last[1] == start:
            last = (last[0], stop)
            continue
        if last is not None:
            yield last
        last = (start, stop)
    if last is not None:
        yield last


def _to_ranges(ranges: Iterable[Iterable[Sequence[int]]]) -> tuple[Ranges, ...]:
    return tuple(tuple(_joined_where_they_meet(of_rank)) for of_rank in ranges)


@attrs.frozen
class Cut:
    """Which indices of one dimension of a whole tensor each rank of an axis holds.

    Args:
        size: Of the whole dimension.
        ranges: By rank, the ranges (start, stop) of indices that it holds, in the order in which it
            keeps them. Empty ranges are dropped and ranges that meet are joined. Indices may lie on
            several ranks; a parameter can be cut only where each lies on exactly one.

    Raises:
        ShardingError: There is no rank, a range leaves the dimension, or two of one rank overlap.
    """

    size: int = attrs.field(converter=operator.index)
    ranges: tuple[Ranges, ...] = attrs.field(converter=_to_ranges)

    def __attrs_post_init__(self) -> None:
        if self.size < 0 or not self.ranges:
            raise ShardingError(
                f"a cut needs a size >= 0 and at least one rank, got size={self.size} over "
                f"{len(self.ranges)} ranks"
            )
        for rank, of_rank in enumerate(self.ranges):
            for start, stop in of_rank:
                if not 0 <= start <= stop <= self.size:
                    raise ShardingError(
                        f"rank {rank} holds {start}..{stop}, which is no range of 0..{self.size}"
                    )
            in_order = sorted(of_rank)
            for (start, stop), (next_start, next_stop) in itertools.pairwise(in_order):
                if next_start < stop:
                    raise ShardingError(
                        f"rank {rank} holds {start}..{stop} and {next_start}..{next_stop}, "
                        "which overlap"
                    )

    @classmethod
    def even(cls, size: int, ranks: int, what: str = "size", axis: str = "tp") -> Cut:
        """Return the cut into equal parts, rank after rank.

        Args:
            size: Of the whole dimension.
            ranks: Ranks on the axis.
            what: The name of the size, for the message.
            axis: The name of the axis, for the message.

        Raises:
            ShardingError: ``ranks`` does not divide ``size``; the message names sizes that fit.
        """
        check_divides(size, ranks, what, axis)
        return cls.uneven(size, ranks)

    @classmethod
    def uneven(cls, size: int, ranks: int) -> Cut:
        """Return the cut into parts of ceil(size / ranks), as `torch.chunk` does.

        The last ranks hold less, or nothing.
        """
        part = -(-size // ranks) if ranks > 0 else 0
        edges = [min(rank * part, size) for rank in range(ranks + 1)]
        return cls(size, [[edge] for edge in itertools.pairwise(edges)])

    @classmethod
    def balanced(cls, size: int, ranks: int) -> Cut:
        """Return the cut whose parts differ by one at most; the first ranks have one more."""
        least, more = divmod(size, ranks) if ranks > 0 else (0, 0)
        return cls.of_sizes(least + (rank < more) for rank in range(ranks))

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> Cut:
        """Return the cut in which each rank holds as many indices as said, rank after rank."""
        edges = list(itertools.accumulate(sizes, initial=0))
        return cls(edges[-1], [[edge] for edge in itertools.pairwise(edges)])

    @classmethod
    def joined(cls, *cuts: Cut) -> Cut:
        """Return the cut of blocks one after the other, each of them cut by itself.

        Each rank keeps its parts of all blocks in their order: fused [gate; up], [Q; K; V].

        Raises:
            ShardingError: There is no block, or they are cut over different numbers of ranks.
        """
        if len({cut.num_ranks for cut in cuts}) != 1:
            raise ShardingError(
                "joined blocks must be cut over the same ranks, got blocks over "
                f"{[cut.num_ranks for cut in cuts]}"
            )
        firsts = list(itertools.accumulate((cut.size for cut in cuts), initial=0))
        ranges = [
            [
                (first + start, first + stop)
                for first, cut in zip(firsts, cuts, strict=False)
                for start, stop in cut.ranges[rank]
            ]
            for rank in range(cuts[0].num_ranks)
        ]
        return cls(firsts[-1], ranges)

    @classmethod
    def whole(cls, size: int, ranks: int) -> Cut:
        """Return the cut that is none: every rank holds all."""
        return cls(size, [[(0, size)]] * ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the axis."""
        return len(self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many indices each rank holds."""
        return tuple(self.numel(rank) for rank in range(self.num_ranks))

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all indices in their order."""
        return all(sum(map(_length, ranges)) == self.size for ranges in self.ranges) and all(
            len(ranges) <= 1 for ranges in self.ranges
        )

    @property
    def is_partition(self) -> bool:
        """Whether every index lies on exactly one rank."""
        in_order = sorted(itertools.chain.from_iterable(self.ranges))
        stops = [0, *(stop for _, stop in in_order)]
        return stops == [*(start for start, _ in in_order), self.size]

    def numel(self, rank: int) -> int:
        """Return how many indices a rank holds."""
        return sum(map(_length, self.ranges[rank]))

    def indices(self, rank: int) -> tuple[int, ...]:
        """Return the indices that a rank holds, in the order in which it keeps them."""
        return tuple(itertools.chain.from_iterable(range(*ends) for ends in self.ranges[rank]))

    def scaled(self, factor: int) -> Cut:
        """Return the cut of a dimension in which each index stands for ``factor`` neighbours."""
        ranges = [[(a * factor, b * factor) for a, b in of_rank] for of_rank in self.ranges]
        return Cut(self.size * factor, ranges)

    def boxes(self, global_shape: Sequence[int], dim: int, rank: int) -> tuple[Box, ...]:
        """Return the boxes of a whole tensor that a rank holds, which in order are its local data.

        A rank that keeps several ranges of a later dim has a box for each of them in every row,
        because its local tensor is stored row by row.

        Args:
            global_shape: Shape of the whole tensor.
            dim: The dimension that is cut; counts from the end where negative.
            rank: The rank.

        Raises:
            ShardingError: The dimension does not have the cut's size.
        """
        shape = tuple(global_shape)
        at = self._dim_of(shape, dim)
        ranges = self.ranges[rank]
        if len(ranges) < 2 or math.prod(shape[:at]) == 1:
            outer: list[Ranges] = [tuple((0, size) for size in shape[:at])]
        else:
            places = itertools.product(*(range(size) for size in shape[:at]))
            outer = [tuple((index, index + 1) for index in place) for place in places]
        inner = tuple((0, size) for size in shape[at + 1 :])
        sides = [(*before, ends, *inner) for before in outer for ends in ranges]
        return tuple(Box([a for a, _ in side], [b for _, b in side]) for side in sides)

    def take(self, tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor: a copy where it is several ranges, else a view.

        Where that is all of the tensor, it is the tensor itself.

        Raises:
            ShardingError: The dimension does not have the cut's size.
        """
        at = self._dim_of(tensor.shape, dim)
        ranges = self.ranges[rank] or ((0, 0),)
        if ranges == ((0, self.size),):
            return tensor
        parts = [tensor.narrow(at, start, stop - start) for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, at)

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Return the whole tensor made of all ranks' parts; an index on several ranks comes once.

        Raises:
            ShardingError: A part is missing or does not have its rank's size, or an index lies on
                no rank.
        """
        sizes = [part.shape[dim] for part in parts]
        if sizes != list(self.sizes):
            raise ShardingError(
                f"the ranks hold {list(self.sizes)} of the {self.size} indices, got parts with "
                f"{sizes} in dim {dim}"
            )
        pieces: list[tuple[int, int, torch.Tensor]] = []
        for ranges, part in zip(self.ranges, parts, strict=True):
            lengths = [stop - start for start, stop in ranges]
            pieces += [
                (*r, p) for r, p in zip(ranges, torch.split(part, lengths, dim), strict=True)
            ]
        found = []
        reached = 0
        for start, stop, piece in sorted(pieces, key=operator.itemgetter(0)):
            if start > reached:
                break
            if stop > reached:
                found.append(piece.narrow(dim, reached - start, stop - reached))
                reached = stop
        if reached != self.size:
            raise ShardingError(f"index {reached} of {self.size} lies on no rank")
        return torch.cat(found or [parts[0]], dim)

    def _dim_of(self, shape: Sequence[int], dim: int) -> int:
        if not -len(shape) <= dim < len(shape) or shape[dim] != self.size:
            raise ShardingError(
                f"dim {dim} of shape {tuple(shape)} must have the cut's size {self.size}"
            )
        return dim % len(shape)


def _length(ends: tuple[int, int]) -> int:
    return ends[1] - ends[0]
