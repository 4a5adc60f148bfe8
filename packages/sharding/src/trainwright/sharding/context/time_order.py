"""Ranges of a sequence: taken out of tensors, and put into time order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trainwright.sharding.tensor.cuts import Ranges

Range = tuple[int, int]


def indices_of(held: Ranges, wanted: Ranges) -> Ranges:
    """Return where wanted positions lie among those held, as ranges of indices, in held order."""
    found = []
    at = 0
    for start, stop in held:
        for first, last in wanted:
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append((at + low - start, at + high - start))
        at += stop - start
    return tuple(found)


def positions_at(positions: Ranges, indices: Ranges) -> Ranges:
    """Return the positions at some indices among all of them."""
    found = []
    at = 0
    for start, stop in positions:
        for first, last in common(((at, at + stop - start),), indices):
            found.append((start + first - at, start + last - at))
        at += stop - start
    return tuple(found)


def common(one: Ranges, other: Ranges) -> Ranges:
    """Return the positions in both, in the order of the first."""
    pairs = [(max(a, c), min(b, d)) for a, b in one for c, d in other]
    return tuple((start, stop) for start, stop in pairs if start < stop)


def count(ranges: Iterable[Range]) -> int:
    """Return how many positions or indices there are."""
    return sum(size(ends) for ends in ranges)


def size(ends: Range) -> int:
    """Return how many positions or indices a range has."""
    return ends[1] - ends[0]


def take_ranges(tensor: torch.Tensor, indices: Ranges, dim: int) -> torch.Tensor:
    """Return some ranges of indices of a dim, one after the other."""
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in indices]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def in_time_order(parts: Sequence[torch.Tensor], held: Sequence[Ranges], dim: int) -> torch.Tensor:
    """Join parts that hold ranges of positions, in the order of the positions."""
    pieces = []
    for part, ranges in zip(parts, held, strict=True):
        at = 0
        for start, stop in ranges:
            pieces.append((start, part.narrow(dim, at, stop - start)))
            at += stop - start
    pieces.sort(key=lambda piece: piece[0])
    return torch.cat([piece for _, piece in pieces], dim) if pieces else parts[0]
