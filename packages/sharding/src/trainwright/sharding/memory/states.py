"""Model states in the flat buffers that data parallelism makes of them, padding included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch

from trainwright.sharding.data.layout import (
    BucketLayout,
    GroupKey,
    LayoutEntry,
    plan_groups,
)
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.memory.away import Away, AwayBytes
from trainwright.sharding.memory.parameters import Held
from trainwright.sharding.mesh import MeshShape

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
WIDE = 4
"""Bytes of what stays in at least float32."""


@attrs.frozen
class BytesPerParameter:
    """What one parameter takes, whole; of ours 2 + 4 + 4 + 8 in 16 bits, 4 + 4 + 8 in float32.

    Args:
        weights: Bytes of what the modules compute with.
        gradients: Bytes of what is accumulated and reduced.
        masters: Bytes of the weights that the optimizer updates, where they are other memory than
            the modules'; 0: it updates those.
        states: Bytes of the optimizer's moments.
        per_piece: Bytes that it keeps once for each piece of a parameter, such as a step count.

    Raises:
        ShardingError: A number is negative, or weights or gradients have no such format.
    """

    weights: int = 4
    gradients: int = 4
    masters: int = 0
    states: int = 8
    per_piece: int = 4

    def __attrs_post_init__(self) -> None:
        for name in ("weights", "gradients"):
            if getattr(self, name) not in _DTYPES:
                raise ShardingError(
                    f"{name} take 2, 4 or 8 bytes a parameter, got {getattr(self, name)}"
                )
        if min(self.masters, self.states, self.per_piece) < 0:
            raise ShardingError(f"bytes must not be negative, got {self}")

    @property
    def total(self) -> int:
        """Bytes of one parameter on one device."""
        return self.weights + self.gradients + self.masters + self.states

    @property
    def wide(self) -> BytesPerParameter:
        """Bytes of a parameter that stays in at least float32, whose weights are the masters."""
        weights, gradients = max(self.weights, WIDE), max(self.gradients, WIDE)
        return attrs.evolve(self, weights=weights, gradients=gradients, masters=0)


@attrs.frozen
class Sharing:
    """How data parallelism shares model states out.

    Args:
        stage: 0 nothing, 1 masters and optimizer states, 2 also gradients, 3 also weights.
        bucket_bytes: Most bytes of gradients in a bucket of several parameters below stage 3.
        alignment: Elements at whose multiples parameters and ranges of ranks begin.
        away: What is not on the device; None: all is.

    Raises:
        ShardingError: A number is out of range, or weights are away which are in use all the time.
    """

    stage: int = 0
    bucket_bytes: int = 25 * 2**20
    alignment: int = 32
    away: Away | None = None

    def __attrs_post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ShardingError(f"stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if min(self.bucket_bytes, self.alignment) < 1:
            raise ShardingError(f"bucket_bytes and alignment must be positive, got {self}")
        if self.away is not None and self.away.weights and self.stage != 3:
            raise ShardingError(f"weights can be away at stage 3 only, got {self}")


@attrs.frozen
class BucketStates:
    """What a rank holds of one bucket.

    Args:
        unit: The module with which it is gathered and reduced.
        numel: Elements of the whole bucket, padding included.
        num_ranks: Ranks that it is cut for.
        stage: As in `Sharing`.
        each: Bytes of its parameters.
        updated: Elements of this rank's pieces, which the optimizer updates: no padding.
        pieces: How many these are.
        away: As in `Sharing`.
    """

    unit: str
    numel: int
    num_ranks: int
    stage: int
    each: BytesPerParameter
    updated: int
    pieces: int
    away: Away | None = None

    @property
    def part(self) -> int:
        """Elements of a rank's range."""
        return self.numel // self.num_ranks

    @property
    def whole_weights(self) -> int:
        """Bytes of all weights, whatever is kept of them."""
        return self.numel * self.each.weights

    @property
    def whole_gradients(self) -> int:
        """Bytes of all gradients."""
        return self.numel * self.each.gradients

    @property
    def keeps_weights_away(self) -> bool:
        """Whether the device has none of the weights between uses."""
        return self.away is not None and self.away.weights

    @property
    def is_gathered(self) -> bool:
        """Whether weights have to be made whole before they are used."""
        return self.stage == 3 and (self.num_ranks > 1 or self.keeps_weights_away)

    @property
    def is_lent(self) -> bool:
        """Whether all gradients have memory only from the first one to the reduction."""
        return self.stage >= 2 and (self.num_ranks > 1 or self.away is not None)

    @property
    def weights(self) -> int:
        """Bytes of weights on the device between steps."""
        if self.keeps_weights_away:
            return 0
        return (self.part if self.is_gathered else self.numel) * self.each.weights

    @property
    def gradients(self) -> int:
        """Bytes of gradients on the device between steps."""
        if self.is_lent and self.away is not None:
            return 0
        return (self.part if self.is_lent else self.numel) * self.each.gradients

    @property
    def states(self) -> int:
        """Bytes of masters and optimizer states on the device."""
        if self.away is not None:
            return 0
        return self.part * self.each.masters + self._moments + self._counts

    @property
    def elsewhere(self) -> AwayBytes:
        """What is not on the device."""
        if self.away is None:
            return AwayBytes()
        each = self.each
        one = (each.masters or each.weights) + each.gradients + each.weights * self.away.weights
        kept = self.part * one + self._moments
        return AwayBytes(kept, self._counts, self.away.in_file, self.pieces > 0)

    @property
    def _moments(self) -> int:
        return self.updated * self.each.states

    @property
    def _counts(self) -> int:
        return self.pieces * self.each.per_piece


def buckets_of(
    held: Iterable[Held],
    layout: MeshShape,
    rank: int,
    sharing: Sharing,
    each: BytesPerParameter,
) -> tuple[BucketStates, ...]:
    """Return what a rank holds of parameters that are data parallel as one model.

    Args:
        held: They, in the order of registration.
        layout: All ranks.
        rank: Which of them.
        sharing: How states are shared out.
        each: Bytes of a parameter.
    """
    entries, kinds = _entries_of(held, each)
    places = layout.places(rank)

    def size(key: GroupKey) -> int:
        return math.prod(layout.size(axis) for axis in _cut_axes(key, layout, sharing))

    groups = plan_groups(
        entries,
        size,
        bucket_bytes=sharing.bucket_bytes if sharing.stage < 3 else None,
        alignment=sharing.alignment,
    )
    found = []
    for group in groups:
        axes = _cut_axes(group.key, layout, sharing)
        for bucket in group.buckets:
            pieces = _own_elements(bucket, _place(places, axes, layout), group.num_ranks)
            found.append(
                BucketStates(
                    group.unit,
                    bucket.stop - bucket.start,
                    group.num_ranks,
                    sharing.stage,
                    kinds[group.key],
                    sum(pieces),
                    len(pieces),
                    sharing.away,
                )
            )
    return tuple(found)


def _entries_of(
    held: Iterable[Held], each: BytesPerParameter
) -> tuple[list[LayoutEntry], dict[GroupKey, BytesPerParameter]]:
    """Return what is laid out, and what a parameter of each group takes."""
    entries: list[LayoutEntry] = []
    kinds: dict[GroupKey, BytesPerParameter] = {}
    for one in held:
        if one.numel:
            own = each.wide if one.is_wide else each
            key = _key_of(one, own)
            kinds[key] = own
            unit = one.name if one.is_at_both_ends else one.unit
            entries.append(LayoutEntry(one.name, one.numel, key, unit))
    return entries, kinds


def _key_of(held: Held, each: BytesPerParameter) -> GroupKey:
    """Return what parameters of one buffer have in common, as `data_parallel` finds it."""
    data, own = (("edp",), ()) if held.is_expert else (("dp", "cp"), ("tp",))
    ends = ("pp",) if held.is_at_both_ends else ()
    partial = own if held.along == "partial" else ()
    replicated = () if held.along == "cut" else own
    master = _DTYPES[each.masters or each.weights]
    return GroupKey(
        (*ends, *data, *partial),
        (*ends, *data, *replicated),
        _DTYPES[each.weights],
        max(master, _DTYPES[each.gradients], key=lambda dtype: dtype.itemsize),
    )


def _cut_axes(key: GroupKey, layout: MeshShape, sharing: Sharing) -> Sequence[str]:
    if sharing.stage == 0:
        return ()
    if layout.dp_replicate == 1:
        return key.data_axes
    return ["dp_shard" if axis == "dp" else axis for axis in key.data_axes]


def _place(places: Mapping[str, int], axes: Sequence[str], layout: MeshShape) -> int:
    number = 0
    for axis in axes:
        number = number * layout.size(axis) + places[axis]
    return number


def _own_elements(bucket: BucketLayout, rank: int, num_ranks: int) -> list[int]:
    """Return the elements of each of a rank's pieces of a bucket."""
    first, last = bucket.range_of(rank, num_ranks)
    each = (min(p.stop, last) - max(p.start, first) for p in bucket.parameters)
    return [numel for numel in each if numel > 0]
