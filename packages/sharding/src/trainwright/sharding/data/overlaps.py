"""What two parts of one global tensor share: copied, or packed for the way between ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainwright.collectives import Box, ShardSpec


def copy_shared(
    source: torch.Tensor, source_spec: ShardSpec, target: torch.Tensor, target_spec: ShardSpec
) -> None:
    """Copy the elements that both specs hold, converted to the target's dtype.

    Args:
        source: Flat local data of ``source_spec``.
        source_spec: Which elements these are.
        target: Flat local data of ``target_spec``; the rest of it is unchanged.
        target_spec: Which elements those are.
    """
    for from_view, to_view in _shared(source_spec, target_spec):
        to_view.of(target).copy_(from_view.of(source))


def pack_shared(
    source: torch.Tensor, source_spec: ShardSpec, target_spec: ShardSpec
) -> torch.Tensor | None:
    """Return the elements that both specs hold in one flat tensor, or None if there are none."""
    views = [view.of(source).reshape(-1) for view, _ in _shared(source_spec, target_spec)]
    return torch.cat(views) if views else None


def unpack_shared(
    packed: torch.Tensor, source_spec: ShardSpec, target: torch.Tensor, target_spec: ShardSpec
) -> None:
    """Write what `pack_shared` made of the same specs to its places in ``target``."""
    at = 0
    for _, view in _shared(source_spec, target_spec):
        into = view.of(target)
        into.copy_(packed[at : at + into.numel()].view(into.shape))
        at += into.numel()


def shared_numel(source_spec: ShardSpec, target_spec: ShardSpec) -> int:
    """Return how many elements both specs hold."""
    return sum(view.inside.numel for view, _ in _shared(source_spec, target_spec))


class _View:
    """A box of the global tensor as a part of flat local data that holds a larger one."""

    def __init__(self, at: int, box: Box, inside: Box) -> None:
        self.at = at
        self.box = box
        self.inside = inside

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements, as a view."""
        steps = zip(self.inside.start, self.inside.stop, self.box.start, strict=True)
        slices = tuple(slice(start - base, stop - base) for start, stop, base in steps)
        return flat[self.at : self.at + self.box.numel].view(self.box.shape)[slices]


def _shared(source: ShardSpec, target: ShardSpec) -> Iterator[tuple[_View, _View]]:
    # Both sides of a message walk this order.
    for at, box in target.parts():
        for start, other in source.parts():
            both = box.intersect(other)
            if both is not None:
                yield _View(start, other, both), _View(at, box, both)
