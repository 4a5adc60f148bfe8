"""The global indices of a box's elements, a bounded number of them at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import torch

from trainwright.collectives.box import Box

# Enough elements to hide the cost of a call, few enough for a CPU's cache or to bound memory.
_CPU_CHUNK = 2**16
_DEVICE_CHUNK = 2**21

Indices = range | torch.Tensor


@attrs.frozen
class _Dim:
    """A dim after joining those that a box covers: the box has [start, stop) of ``size``."""

    start: int
    stop: int
    size: int


def walk(shape: Sequence[int], box: Box, device: torch.device) -> Iterator[tuple[slice, Indices]]:
    """Yield (flat positions in the box, their row-major indices in the tensor) in order.

    The indices are a ``range`` where all of the box is contiguous, else an int64 tensor.
    """
    chunk = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    dims = _join(shape, box)
    contiguous = all(dim.stop - dim.start == 1 for dim in dims[:-1])
    base = _offset(dims)
    for first in range(0, box.numel, chunk):
        last = min(first + chunk, box.numel)
        if contiguous:
            yield slice(first, last), range(base + first, base + last)
        else:
            at = torch.arange(first, last, device=device)
            yield slice(first, last), _unravel(at, dims).add_(base)


def _join(shape: Sequence[int], box: Box) -> list[_Dim]:
    joined: list[_Dim] = []
    for start, stop, size in reversed(list(zip(box.start, box.stop, shape, strict=True))):
        inner = joined[-1] if joined else None
        if inner is not None and inner.start == 0 and inner.stop == inner.size:
            row = inner.size
            joined[-1] = _Dim(start * row, stop * row, size * row)
        else:
            joined.append(_Dim(start, stop, size))
    return joined[::-1]


def _offset(dims: Sequence[_Dim]) -> int:
    """Return the index of the box's first element."""
    index = 0
    for dim in dims:
        index = index * dim.size + dim.start
    return index


def _unravel(position: torch.Tensor, dims: Sequence[_Dim]) -> torch.Tensor:
    """Return how far the elements at flat positions in the box lie from its first element."""
    strides = [math.prod(dim.size for dim in dims[at + 1 :]) for at in range(len(dims))]
    index = torch.zeros_like(position)
    for dim, stride in reversed(list(zip(dims, strides, strict=True))):
        extent = dim.stop - dim.start
        index.add_((position % extent).mul_(stride))
        position = position // extent
    return index
