"""From one layout of the sequence to another, for layers that need time order."""

from __future__ import annotations

import torch

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.time_order import (
    common,
    count,
    in_time_order,
    indices_of,
    take_ranges,
)
from trainwright.sharding.errors import ShardingError


def change_layout(
    part: torch.Tensor,
    dim: int,
    comm: Communicator,
    *,
    source: ContextLayout,
    target: ContextLayout,
) -> torch.Tensor:
    """Return this rank's part under another layout of the same sequence; gradients travel back.

    Attention likes zigzag parts; a convolution or a recurrent layer along the sequence needs
    contiguous ones.

    Args:
        part: This rank's positions along ``dim`` under ``source``.
        dim: Counts from the end where negative.
        comm: The ranks of the sequence, in the order of the layouts.
        source: The layout of ``part``.
        target: The layout wanted.

    Returns:
        This rank's positions under ``target``; the part itself where the layouts are one.

    Raises:
        ShardingError: The layouts differ in length or size, the size is not that of ``comm``, or
            the part does not have this rank's number of positions.

    Communicates:
        One all-to-all of the positions that change ranks, backward the same.
    """
    if (source.length, source.size) != (target.length, target.size) or source.size != comm.size:
        raise ShardingError(
            f"layouts of one sequence over the {comm.size} ranks of {comm.name!r} are needed, got "
            f"{source} and {target}"
        )
    held, wanted = source.ranges, target.ranges
    rank = comm.rank
    if not -part.ndim <= dim < part.ndim or part.shape[dim] != source.sizes[rank]:
        raise ShardingError(
            f"rank {rank} holds {source.sizes[rank]} positions under {source}, got shape "
            f"{tuple(part.shape)} and dim {dim}"
        )
    if held == wanted:
        return part
    rows = part.movedim(dim, 0)
    sent = [take_ranges(rows, indices_of(held[rank], of_rank), 0) for of_rank in wanted]
    coming = [common(of_rank, wanted[rank]) for of_rank in held]
    sizes = [count(ranges) for ranges in coming]
    given = [each.shape[0] for each in sent]
    received = differentiable.all_to_all(torch.cat(sent), comm, sizes, given)
    return in_time_order(torch.split(received, sizes), coming, 0).movedim(0, dim)
