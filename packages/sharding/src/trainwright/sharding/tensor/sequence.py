"""Sequence parallelism: between two products each rank has its part of the positions.

Norms, dropout and residuals see a rank's positions only. A column product gathers them, a row
product sums and cuts them again, so that a layer moves as much as with all-reduces. Parts are those
of `Cut.uneven`: the last ranks may have fewer positions, or none.
"""

from __future__ import annotations

from typing import Any, cast

import attrs
import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.parts import join_parts, join_parts_for_terms, sum_part, take_part
from trainwright.sharding.tensor.pending import Pending, start_gather


@attrs.frozen
class SequenceSharding:
    """Which dim of activations is the sequence, and what a backward keeps of gathered inputs.

    Args:
        dim: The dim of the sequence, counted from the front.
        keeps_whole: Whether a column product keeps its gathered input, or only this rank's part,
            which is gathered again in the backward: ``t`` times less memory for the inputs, one
            more all-gather for each entrance (10 instead of 8 times s·b·h·(t-1)/t a layer).
        length: Positions of the whole sequence; None where it is a multiple of the ranks, so that
            all have equally many.

    Raises:
        ShardingError: ``dim`` or ``length`` is negative.
    """

    dim: int = 1
    keeps_whole: bool = False
    length: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.dim < 0 or (self.length is not None and self.length < 0):
            raise ShardingError(
                f"dim of a sequence counts from the front and its length is >= 0, got {self}"
            )

    @classmethod
    def keeping_shards(cls, dim: int = 1, length: int | None = None) -> SequenceSharding:
        """Return the kind that keeps parts and gathers them again: least memory."""
        return cls(dim, False, length)

    @classmethod
    def keeping_whole(cls, dim: int = 1, length: int | None = None) -> SequenceSharding:
        """Return the kind that keeps gathered inputs: least traffic."""
        return cls(dim, True, length)

    def length_of(self, part: torch.Tensor, comm: Communicator) -> int:
        """Return the whole length, given one rank's part.

        Raises:
            ShardingError: The part does not have the size that the length gives this rank.
        """
        if self.dim >= part.ndim:
            raise ShardingError(
                f"the sequence is dim {self.dim}, got a tensor of shape {tuple(part.shape)}"
            )
        here = part.shape[self.dim]
        if self.length is None:
            return here * comm.size
        most = -(-self.length // comm.size)
        own = max(0, min(most, self.length - comm.rank * most))
        if here != own:
            raise ShardingError(
                f"rank {comm.rank} of {comm.size} has {own} of the {self.length} positions, got "
                f"{here} in dim {self.dim} of shape {tuple(part.shape)}"
            )
        return self.length


def split_sequence(
    whole: torch.Tensor, tp: Communicator, sequence: SequenceSharding
) -> torch.Tensor:
    """Keep this rank's positions of a replicated tensor.

    Communicates:
        Forward nothing; backward one all-gather of the gradient.
    """
    length = whole.shape[sequence.dim]
    if length % tp.size == 0:
        return differentiable.replicate_to_shard(whole, tp, sequence.dim)
    return take_part(whole, tp, Cut.uneven(length, tp.size), sequence.dim)


def gather_sequence(
    part: torch.Tensor, tp: Communicator, sequence: SequenceSharding
) -> torch.Tensor:
    """Make the whole sequence for work that every rank does alike.

    Communicates:
        Forward one all-gather; backward nothing.
    """
    length = sequence.length_of(part, tp)
    if length % tp.size == 0:
        return differentiable.shard_to_replicate(part, tp, sequence.dim)
    return join_parts(part, tp, Cut.uneven(length, tp.size), sequence.dim)


def enter_sequence(
    part: torch.Tensor, tp: Communicator, sequence: SequenceSharding
) -> torch.Tensor:
    """Make the whole sequence for products of which each rank computes another part.

    Column layers with ``input_is_entered`` that get the returned tensor itself share it: with kept
    parts they keep no more than the part, and their backward gathers it once for all of them.

    Communicates:
        Forward one all-gather, backward one reduce-scatter of the gradient; with kept parts
        backward one more all-gather.
    """
    length = sequence.length_of(part, tp)
    if tp.size == 1:
        return part
    if length % tp.size == 0:
        whole = differentiable.shard_to_partial(part, tp, sequence.dim)
    else:
        cut = Cut.uneven(length, tp.size)
        whole = join_parts_for_terms(part, tp, cut, sequence.dim)
    if torch.is_grad_enabled() and not sequence.keeps_whole:
        # On this very tensor only: whatever is computed from it has to be kept for itself.
        versions = (part._version, whole._version)
        regather = Regather(tp, sequence.dim, length)
        cast(Any, whole).entrance = Entrance(part, regather, versions)
    return whole


def leave_sequence(
    terms: torch.Tensor, tp: Communicator, sequence: SequenceSharding
) -> torch.Tensor:
    """Sum the ranks' terms of a whole sequence and keep this rank's positions.

    Communicates:
        Forward one reduce-scatter; backward one all-gather of the gradient.
    """
    length = terms.shape[sequence.dim]
    if length % tp.size == 0:
        return differentiable.partial_to_shard(terms, tp, sequence.dim)
    return sum_part(terms, tp, Cut.uneven(length, tp.size), sequence.dim)


class Regather:
    """Gathers a kept part again, once a backward for all products that share it.

    Args:
        comm: The tensor-parallel ranks.
        dim: The dim of the sequence.
        length: The whole length.
    """

    def __init__(self, comm: Communicator, dim: int, length: int) -> None:
        self.comm = comm
        self.dim = dim
        self.length = length
        self.users = 0
        self._served = 0
        self._pending: Pending | None = None
        self._whole: torch.Tensor | None = None

    def start(self, part: torch.Tensor) -> None:
        """Start to gather, unless another product of this backward has done it."""
        if self._pending is None and self._whole is None:
            self._pending = start_gather(part, self.comm, self.dim, self.length)

    def take(self) -> torch.Tensor:
        """Return what was gathered, once for each product that has called ``start``."""
        if self._pending is not None:
            self._whole = self._pending.finish()
            self._pending = None
        whole = self._whole
        assert whole is not None, "a product starts to gather before it takes"
        self._served += 1
        if self._served >= self.users:
            # The last product of this backward; another backward gathers again.
            self._served = 0
            self._whole = None
        return whole


@attrs.frozen(eq=False)
class Entrance:
    """What a gathered tensor was gathered from; columns find it on that tensor.

    Args:
        part: This rank's positions.
        regather: Shared by the products of one gathered tensor.
        versions: Of the part and of the gathered tensor when one was made of the other.
    """

    part: torch.Tensor
    regather: Regather
    versions: tuple[int, int]


def entrance_of(whole: torch.Tensor) -> Entrance | None:
    """Return what a tensor was gathered from, None where it is to be kept itself."""
    found = getattr(whole, "entrance", None)
    if not isinstance(found, Entrance):
        return None
    # Changed in place since, it is not what gathering the part again would give.
    return found if found.versions == (found.part._version, whole._version) else None
