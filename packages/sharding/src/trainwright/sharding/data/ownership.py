"""Who keeps what: the pieces of any data rank, from the plan alone."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trainwright.collectives import ShardSpec
from trainwright.sharding.data.layout import BucketLayout, GroupLayout, ParameterRange
from trainwright.sharding.errors import ShardingError


def piece_spec_on(
    layout: Iterable[GroupLayout],
    entry_spec: ShardSpec,
    name: str,
    data_rank: int,
    *,
    dp_replicate: int = 1,
) -> ShardSpec | None:
    """Return the spec of the piece of a parameter that one data rank keeps, without communication.

    Args:
        layout: `DataParallel.layout`, which is the same on all ranks of a group's data axes.
        entry_spec: This rank's elements of the parameter, uncut by data parallelism.
        name: The parameter.
        data_rank: A rank of the communicator that the parameter's group is cut over; where it is
            not cut, all of them keep the same.
        dp_replicate: ``mesh.size("dp_replicate")``: how many such communicators repeat each other.

    Returns:
        What `Piece.spec` says there, or None where that rank keeps nothing of it. (Where one rank
        keeps all, "dp" stands for "dp_replicate": the ranks are the same.)

    Raises:
        ShardingError: The parameter is not in the layout, or there is no such rank.
    """
    group, bucket, part = _find(layout, name)
    if group.num_ranks == 1:
        return entry_spec
    if not 0 <= data_rank < group.num_ranks:
        raise ShardingError(
            f"{name} is cut over {group.num_ranks} data ranks, 0..{group.num_ranks - 1}, "
            f"got data_rank={data_rank}"
        )
    first, last = bucket.range_of(data_rank, group.num_ranks)
    start = max(first, part.start)
    stop = min(last, part.stop)
    if start >= stop:
        return None
    cut = attrs.evolve(entry_spec, replicated=_uncut_axes(entry_spec, group, dp_replicate))
    return cut.narrow(start - part.start, stop - part.start)


def _uncut_axes(spec: ShardSpec, group: GroupLayout, dp_replicate: int) -> tuple[str, ...]:
    kept: list[str] = []
    for axis in spec.replicated:
        if axis not in group.key.data_axes:
            kept.append(axis)
        elif axis == "dp" and dp_replicate > 1:
            kept.append("dp_replicate")
    return tuple(kept)


def _find(
    layout: Iterable[GroupLayout], name: str
) -> tuple[GroupLayout, BucketLayout, ParameterRange]:
    for group in layout:
        for bucket in group.buckets:
            for part in bucket.parameters:
                if part.name == name:
                    return group, bucket, part
    raise ShardingError(
        f"{name} has no place in the layout; it is frozen, has no elements, or is another model's"
    )
