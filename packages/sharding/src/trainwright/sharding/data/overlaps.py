"""Copies what two parts of one global tensor share."""

from __future__ import annotations

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
    for at, box in target_spec.parts():
        for start, other in source_spec.parts():
            both = box.intersect(other)
            if both is not None:
                inside = target[at : at + box.numel].view(box.shape)
                outside = source[start : start + other.numel].view(other.shape)
                inside[_within(both, box)].copy_(outside[_within(both, other)])


def shared_numel(spec: ShardSpec, other: ShardSpec) -> int:
    """Return how many elements both specs hold."""
    shared = (box.intersect(part) for _, box in spec.parts() for _, part in other.parts())
    return sum(both.numel for both in shared if both is not None)


def _within(both: Box, box: Box) -> tuple[slice, ...]:
    return tuple(
        slice(start - base, stop - base)
        for start, stop, base in zip(both.start, both.stop, box.start, strict=True)
    )
