"""Which elements of a global tensor a rank holds, and in which order: plain data."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

from .box import Box, to_ints
from .errors import UsageError
from .overlap import find_crossing_boxes, find_runs

__all__ = ["Box", "ShardSpec"]


def _to_boxes(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(boxes)


def _to_names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise UsageError(f"axes are a sequence of names: write ({names!r},), not {names!r}")
    return tuple(names)


@attrs.frozen
class ShardSpec:
    """The part of one global tensor that a rank holds.

    The local data is: each box of the global tensor flattened row-major, concatenated in the order
    of ``boxes``, then elements ``[start, stop)`` of that. A tensor-parallel shard is one box, a
    fused shard (query, key, value; gate, up) several, what ZeRO keeps of it a range.

    Args:
        name: The parameter's full name in the plain model.
        global_shape: Shape of the whole tensor.
        boxes: Parts of the global tensor that share no element; none at all where a rank holds
            nothing of it.
        start: First element kept, counted in the concatenation of the boxes.
        stop: One past the last element kept.
        replicated: Mesh axes along which every rank holds these same elements.

    Raises:
        UsageError: A box leaves the tensor, boxes share elements, or the range leaves the boxes.
    """

    name: str
    global_shape: tuple[int, ...] = attrs.field(converter=to_ints)
    boxes: tuple[Box, ...] = attrs.field(converter=_to_boxes)
    start: int = attrs.field(converter=operator.index)
    stop: int = attrs.field(converter=operator.index)
    replicated: tuple[str, ...] = attrs.field(default=(), converter=_to_names)

    def __attrs_post_init__(self) -> None:
        if any(size < 0 for size in self.global_shape):
            raise UsageError(f"{self.name}: a shape has no negative sizes, got {self.global_shape}")
        for box in self.boxes:
            try:
                box.check_within(self.global_shape)
            except UsageError as error:
                raise UsageError(f"{self.name}: {error}") from None
        crossing = find_crossing_boxes(self.boxes)
        if crossing is not None:
            first, second = (self.boxes[index] for index in crossing)
            raise UsageError(f"{self.name}: boxes {first} and {second} share elements")
        if not 0 <= self.start <= self.stop <= self.total:
            raise UsageError(
                f"{self.name}: the range must satisfy 0 <= start <= stop <= {self.total} "
                f"(the elements of all boxes), got start={self.start} stop={self.stop}"
            )
        if len(set(self.replicated)) != len(self.replicated):
            raise UsageError(f"{self.name}: an axis is named twice in {self.replicated}")

    @classmethod
    def full(cls, name: str, shape: Iterable[int], replicated: Iterable[str] = ()) -> ShardSpec:
        """Return the spec of a rank that holds the whole tensor of ``shape``."""
        box = Box.full(shape)
        return cls(name, box.stop, (box,), 0, box.numel, replicated)

    @classmethod
    def of_boxes(
        cls,
        name: str,
        global_shape: Iterable[int],
        boxes: Iterable[Box],
        replicated: Iterable[str] = (),
    ) -> ShardSpec:
        """Return the spec of a rank that holds all elements of ``boxes``."""
        held = tuple(boxes)
        total = sum(box.numel for box in held)
        return cls(name, global_shape, held, 0, total, replicated)

    @property
    def total(self) -> int:
        """The number of elements of all boxes, of which a range is kept."""
        return sum(box.numel for box in self.boxes)

    @property
    def numel(self) -> int:
        """The number of elements held."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether all elements of the boxes are held."""
        return self.numel == self.total

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor.

        All boxes concatenated along dim 0 when `whole`; flat for a range, and where boxes differ
        beyond dim 0 or there is none.
        """
        shapes = [box.shape for box in self.boxes]
        if not self.whole or not shapes:
            return (self.numel,)
        if len(shapes) == 1:
            return shapes[0]
        if len({shape[1:] for shape in shapes}) > 1:
            return (self.numel,)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def narrow(self, start: int, stop: int) -> ShardSpec:
        """Return the spec of elements [start, stop) of this spec's local data.

        Raises:
            UsageError: Unless ``0 <= start <= stop <= numel``.
        """
        if not 0 <= start <= stop <= self.numel:
            raise UsageError(
                f"{self.name}: cannot narrow {self.numel} elements to start={start} stop={stop}"
            )
        return attrs.evolve(self, start=self.start + start, stop=self.start + stop)

    def parts(self) -> tuple[tuple[int, Box], ...]:
        """Return (flat local position, box) of the boxes that the held elements are made of.

        Their elements, flattened row-major and concatenated in order, are the local data.
        """
        found: list[tuple[int, Box]] = []
        before = 0
        at = 0
        for box in self.boxes:
            for part in box.cut(max(self.start - before, 0), min(self.stop - before, box.numel)):
                found.append((at, part))
                at += part.numel
            before += box.numel
        return tuple(found)

    def extract(self, global_tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of `local_shape` with this rank's elements of ``global_tensor``.

        Raises:
            UsageError: ``global_tensor`` does not have `global_shape`.
        """
        self._check_global(global_tensor)
        source = global_tensor.detach()
        local = source.new_empty(self.numel)
        for at, box in self.parts():
            local[at : at + box.numel].view(box.shape).copy_(source[box.slices])
        return local.view(self.local_shape)

    def insert(self, local: torch.Tensor, into: torch.Tensor) -> None:
        """Write ``local`` to its place in the global tensor ``into``; the rest is unchanged.

        Raises:
            UsageError: A shape is not this spec's, or the dtypes differ.
        """
        self._check_global(into)
        if local.shape not in (self.local_shape, (self.numel,)):
            raise UsageError(
                f"{self.name}: the local tensor must have shape {self.local_shape} "
                f"or be flat, got {tuple(local.shape)}"
            )
        if local.dtype != into.dtype:
            raise UsageError(
                f"{self.name}: cannot insert {local.dtype} into {into.dtype}; convert it first"
            )
        flat = local.detach().reshape(-1)
        target = into.detach()
        for at, box in self.parts():
            target[box.slices].copy_(flat[at : at + box.numel].view(box.shape))

    def overlap(self, other: ShardSpec) -> list[tuple[slice, slice]]:
        """Return the runs of elements that both specs hold, as flat local positions.

        ``ShardSpec.overlap(a, b)`` gives pairs (slice of a's local data, slice of b's local data)
        of equal length with the same global elements; each shared element is in exactly one pair.
        Runs are as long as both orders allow and sorted by a's position, so copying them pair by
        pair moves a checkpoint or a weight from any cut to any other.

        Raises:
            UsageError: The specs are of tensors of different shapes.
        """
        if self.global_shape != other.global_shape:
            raise UsageError(
                f"{self.name} of shape {self.global_shape} and {other.name} of shape "
                f"{other.global_shape} are not cut from the same tensor"
            )
        runs = find_runs(self.parts(), other.parts()).tolist()
        return [(slice(a, a + n), slice(b, b + n)) for a, b, n in runs]

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain lists, numbers and strings for a JSON file."""
        return {
            "name": self.name,
            "global_shape": list(self.global_shape),
            "boxes": [[list(box.start), list(box.stop)] for box in self.boxes],
            "start": self.start,
            "stop": self.stop,
            "replicated": list(self.replicated),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardSpec:
        """Return the spec that `to_json` described.

        Raises:
            UsageError: A field is missing, unknown or invalid.
        """
        fields = {field.name for field in attrs.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != fields:
            found = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
            raise UsageError(f"a shard spec has the fields {sorted(fields)}, got {found}")
        name = data["name"]
        if type(name) is not str:
            raise UsageError(f"the name of a shard spec must be a text, got {name!r}")
        try:
            boxes = tuple(Box(start, stop) for start, stop in data["boxes"])
        except (TypeError, ValueError) as error:
            raise UsageError(f"{name}: boxes must be [start, stop] pairs") from error
        try:
            return cls(**{**data, "boxes": boxes})
        except (TypeError, OverflowError) as error:
            raise UsageError(f"{name} has a field of another type: {error}") from error

    def _check_global(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self.global_shape:
            raise UsageError(
                f"{self.name}: the global tensor must have shape {self.global_shape}, "
                f"got {tuple(tensor.shape)}"
            )
