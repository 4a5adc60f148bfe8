"""Where every parameter lies in the flat buffers: plain data, planned without touching a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import torch

_DATA_AXES = ("dp", "cp", "edp")


@attrs.frozen
class GroupKey:
    """What parameters must have in common to lie in one buffer.

    Args:
        reduction_axes: Mesh axes over which their gradients are summed.
        replicated_axes: Mesh axes along which ranks hold the same weight.
        weight_dtype: Dtype of the module's weights.
        master_dtype: Dtype of gradients and of the weights that the optimizer updates.
        trainable: Whether they have gradients. Others have a place only at stage 3, for their
            weights.
        is_coded: Whether their weights travel as codes.
    """

    reduction_axes: tuple[str, ...]
    replicated_axes: tuple[str, ...]
    weight_dtype: torch.dtype
    master_dtype: torch.dtype
    trainable: bool = True
    is_coded: bool = False

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes summed over first, over whose ranks a group's buckets are cut."""
        return tuple(axis for axis in self.reduction_axes if axis in _DATA_AXES)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The other axes, summed over afterwards on the range that a rank keeps."""
        return tuple(axis for axis in self.reduction_axes if axis not in _DATA_AXES)


@attrs.frozen
class LayoutEntry:
    """A parameter to be laid out."""

    name: str
    numel: int
    key: GroupKey
    unit: str = ""


@attrs.frozen
class ParameterRange:
    """Elements [start, stop) of a group's buffer, which hold one parameter."""

    name: str
    start: int
    stop: int


@attrs.frozen
class BucketLayout:
    """Elements [start, stop) of a group's buffer that are reduced by one collective.

    Args:
        start: First element.
        stop: One past the last element, padding included.
        parameters: The parameters in it, in the order in which they lie.
        position: Where the last of them stands in the order in which gradients are expected.
    """

    start: int
    stop: int
    parameters: tuple[ParameterRange, ...]
    position: int

    def range_of(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return the elements of the group's buffer that one rank keeps of this bucket."""
        part = (self.stop - self.start) // num_ranks
        return self.start + rank * part, self.start + (rank + 1) * part


@attrs.frozen
class GroupLayout:
    """The parameters of one unit and key, numbered through, and the buckets they are cut into.

    Args:
        key: What its parameters have in common.
        num_ranks: How many ranks its buckets are cut for.
        numel: Elements of all buckets together.
        buckets: They tile the elements; each has memory of its own.
        unit: Name of the unit; "" is what no chosen module holds.
    """

    key: GroupKey
    num_ranks: int
    numel: int
    buckets: tuple[BucketLayout, ...]
    unit: str = ""


def plan_groups(
    entries: Sequence[LayoutEntry],
    num_ranks: Callable[[GroupKey], int],
    *,
    bucket_bytes: int | None,
    alignment: int,
) -> tuple[GroupLayout, ...]:
    """Lay parameters out in groups of one unit and key, last registered first.

    A backward computes the gradients of the last layers first, so buckets fill up in this order.
    The plan depends on nothing that differs between the ranks of a reduction.

    Args:
        entries: The parameters in the order of registration; none is empty.
        num_ranks: How many ranks the buckets of a group are cut for.
        bucket_bytes: Most bytes of gradients in a bucket of several parameters; None makes each
            group one bucket.
        alignment: Elements; parameters and the ranges of ranks start at multiples of it.
    """
    members: dict[tuple[str, GroupKey], list[tuple[int, LayoutEntry]]] = {}
    for position, entry in enumerate(reversed(entries)):
        members.setdefault((entry.unit, entry.key), []).append((position, entry))
    planned: list[GroupLayout] = []
    for (unit, key), ordered in members.items():
        most = None if bucket_bytes is None else bucket_bytes // key.master_dtype.itemsize
        numel, buckets = _plan_buckets(ordered, num_ranks(key), most, alignment)
        planned.append(GroupLayout(key, num_ranks(key), numel, buckets, unit))
    return tuple(planned)


def launch_order(layout: Sequence[GroupLayout]) -> list[tuple[GroupLayout, BucketLayout]]:
    """Return the buckets of all groups in the order in which they are reduced on every rank.

    A bucket comes when its last gradient is expected, whatever the group.
    """
    buckets = [(group, bucket) for group in layout for bucket in group.buckets]
    return sorted(buckets, key=lambda item: item[1].position)


def _plan_buckets(
    ordered: list[tuple[int, LayoutEntry]], num_ranks: int, most: int | None, alignment: int
) -> tuple[int, tuple[BucketLayout, ...]]:
    buckets: list[BucketLayout] = []
    start = 0
    for chosen in _fill(ordered, most, alignment):
        at = start
        ranges: list[ParameterRange] = []
        for _, entry in chosen:
            ranges.append(ParameterRange(entry.name, at, at + entry.numel))
            at += _round_up(entry.numel, alignment)
        stop = start + _round_up(at - start, alignment * num_ranks)
        buckets.append(BucketLayout(start, stop, tuple(ranges), position=chosen[-1][0]))
        start = stop
    return start, tuple(buckets)


def _fill(
    ordered: Iterable[tuple[int, LayoutEntry]], most: int | None, alignment: int
) -> Iterable[list[tuple[int, LayoutEntry]]]:
    chosen: list[tuple[int, LayoutEntry]] = []
    filled = 0
    for position, entry in ordered:
        size = _round_up(entry.numel, alignment)
        if chosen and most is not None and filled + size > most:
            yield chosen
            chosen = []
            filled = 0
        chosen.append((position, entry))
        filled += size
    if chosen:
        yield chosen


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
