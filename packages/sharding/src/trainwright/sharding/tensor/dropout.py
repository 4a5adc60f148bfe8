"""Dropout by place: which elements are dropped depends on where they stand, not on who computes.

Each element has an index in the whole activation: sample, then the place in the sample. A mask is a
function of seed, name, step and that index, so every layout drops the same elements: ranks that
hold the same elements agree, ranks that hold different ones (other samples, positions, heads) draw
independently. No generator of the process is read or changed.
"""

# Shapes: B samples of this rank, ... dims of one sample.

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import attrs
import torch
from torch import nn

from trainwright.collectives import Box, random
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut


@attrs.frozen
class ShardedDim:
    """One dim of an activation that is cut over the ranks of an axis.

    Args:
        dim: The dim, counted from the front; 0 is the samples.
        rank: This rank on the axis.
        ranks: Ranks on the axis.
        cut: Which indices each rank has; None: equal parts, rank after rank.

    Raises:
        ShardingError: The rank is none of the axis, the dim is negative, the cut is over other
            ranks, or this rank's part of it is not one range.
    """

    dim: int
    rank: int
    ranks: int
    cut: Cut | None = None

    def __attrs_post_init__(self) -> None:
        if self.dim < 0 or not 0 <= self.rank < self.ranks:
            raise ShardingError(f"dim >= 0 and 0 <= rank < ranks must hold, got {self}")
        if self.cut is None:
            return
        if self.cut.num_ranks != self.ranks or len(self.cut.ranges[self.rank]) > 1:
            raise ShardingError(
                f"a cut activation is one range on each of {self.ranks} ranks, got {self.cut}"
            )

    def place(self, local: int) -> tuple[int, int]:
        """Return the first index here and the whole size, given the local size."""
        if self.cut is None:
            return self.rank * local, self.ranks * local
        if local != self.cut.numel(self.rank):
            raise ShardingError(
                f"rank {self.rank} has {self.cut.numel(self.rank)} of {self.cut.size} indices of "
                f"dim {self.dim}, got {local}"
            )
        ranges = self.cut.ranges[self.rank]
        return ranges[0][0] if ranges else 0, self.cut.size


class DropoutPlace:
    """Where in the training run the model stands: one object, shared by all its dropouts.

    Set it before each forward. A recomputed forward must see what the first one saw: give
    ``contexts`` to `torch.utils.checkpoint.checkpoint` as its ``context_fn``.

    Args:
        step: Number of the optimizer step.
        first_sample: Number, in the step's whole batch, of the first sample of the forward. Where
            dim 0 is a `ShardedDim`, of the ranks' samples together.
    """

    def __init__(self, step: int = 0, first_sample: int = 0) -> None:
        self.step = step
        self.first_sample = first_sample

    @contextlib.contextmanager
    def at(self, step: int, first_sample: int = 0) -> Iterator[None]:
        """Stand elsewhere within the block."""
        before = (self.step, self.first_sample)
        self.step, self.first_sample = step, first_sample
        try:
            yield
        finally:
            self.step, self.first_sample = before

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for a forward now and for its recomputation later."""
        return contextlib.nullcontext(), self.at(self.step, self.first_sample)


class PlacedDropout(nn.Module):
    """Dropout whose mask is the same in every layout.

    A module that is used twice in one forward drops the same places twice: use two with names of
    their own.

    Args:
        p: Probability of dropping an element; the others are multiplied by 1 / (1 - p).
        seed: The run's seed.
        name: The module's name in the plain model.
        place: Step and first sample; None: a place of its own, at step 0 and sample 0.
        shards: Which dims of the input are cut; empty where it is replicated.

    Raises:
        ShardingError: ``p`` is no probability, or two shards are of one dim.
    """

    def __init__(
        self,
        p: float,
        seed: int,
        name: str,
        *,
        place: DropoutPlace | None = None,
        shards: Iterable[ShardedDim] = (),
    ) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ShardingError(f"p must be between 0 and 1, got {p}")
        self.p = p
        self.key = random.Key(seed, name)
        self.place = DropoutPlace() if place is None else place
        self.shards = tuple(shards)
        if len({shard.dim for shard in self.shards}) != len(self.shards):
            raise ShardingError(f"each dim is cut once, got {self.shards}")

    def forward(self, input: torch.Tensor, samples: torch.Tensor | None = None) -> torch.Tensor:
        """Drop elements of ``[B, ...]`` while training.

        Args:
            input: This rank's part.
            samples: Int64 ``[B]``, the number of each sample in the step's batch; None: those that
                follow ``place.first_sample``. As an argument it is right under recomputation, and
                for samples in any order.
        """
        if not self.training or self.p == 0.0:
            return input
        key = attrs.evolve(self.key, step=self.place.step)
        first, shape = self._in_whole(input.shape)
        if samples is None:
            stop = [start + size for start, size in zip(first, input.shape, strict=True)]
            kept = random.bernoulli(
                key, shape, 1.0 - self.p, box=Box(first, stop), device=input.device
            )
        else:
            at = _indices(samples, first, shape, input.shape)
            kept = random.uniform_at(key, at, dtype=torch.float64) < 1.0 - self.p
        # Only the mask is kept for the backward.
        return (input * kept).mul_(1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0)

    def extra_repr(self) -> str:
        """Say the probability, the name and the dims that are cut."""
        cut = [f"dim {s.dim}: {s.rank} of {s.ranks}" for s in self.shards]
        return ", ".join([f"p={self.p}", f"name={self.key.name!r}", *cut])

    def _in_whole(self, local: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the first index and the size of each dim; the samples begin at the place."""
        first, shape = [0] * len(local), list(local)
        for shard in self.shards:
            if shard.dim >= len(local):
                raise ShardingError(
                    f"{self.key.name}: dim {shard.dim} is cut, got shape {tuple(local)}"
                )
            first[shard.dim], shape[shard.dim] = shard.place(local[shard.dim])
        first[0] += self.place.first_sample
        # The samples are the slowest dim: how many there are changes no index.
        shape[0] = first[0] + local[0]
        return first, shape


def _indices(
    samples: torch.Tensor, first: Sequence[int], shape: Sequence[int], local: Sequence[int]
) -> torch.Tensor:
    """Return the flat index in the whole batch of every element, ``[B, ...]``."""
    if samples.shape != (local[0],) or samples.dtype != torch.int64:
        raise ShardingError(
            f"samples are one int64 for each of {local[0]} samples, got {samples.dtype} of shape "
            f"{tuple(samples.shape)}"
        )
    at = samples.view(-1, *[1] * (len(local) - 1)) * math.prod(shape[1:])
    for dim in range(1, len(local)):
        here = torch.arange(first[dim], first[dim] + local[dim], device=samples.device)
        here = here * math.prod(shape[dim + 1 :])
        at = at + here.view(-1, *[1] * (len(local) - 1 - dim))
    return at
