"""Which runs of flat positions hold the same elements in two orders of boxes."""

# Arrays: n boxes, d dims; a run is (position in a, position in b, length).

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from .box import Box

_Ints = npt.NDArray[np.int64]
Parts = Sequence[tuple[int, Box]]


def find_crossing_boxes(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the numbers of two boxes that share an element, or None."""
    if len(boxes) < 2:
        return None
    starts, stops = _corners(boxes)
    pairs = _crossing_pairs((starts, stops), (starts, stops))
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    if len(pairs) == 0:
        return None
    return int(pairs[0, 0]), int(pairs[0, 1])


def find_runs(a: Parts, b: Parts) -> _Ints:
    """Return an int64 array [runs, 3] of (position in a, position in b, length), sorted by a.

    Args:
        a: (flat position, box) of boxes that are stored row-major one after the other.
        b: The same of another store of parts of the same tensor.

    The number of runs is bounded by the rows that boxes cut; no element is looked at alone.
    """
    if not a or not b:
        return np.empty((0, 3), dtype=np.int64)
    if list(a) == list(b):  # what is loaded as it was saved need not be searched
        same = [(at, at, box.numel) for at, box in sorted(a, key=itemgetter(0)) if box.numel]
        return _merge(np.array(same, dtype=np.int64).reshape(-1, 3))
    pairs = _crossing_pairs(
        _corners([box for _, box in a]),
        _corners([box for _, box in b]),
    )
    found = [_runs_of_pair(a[i], b[j]) for i, j in pairs.tolist()]
    if not found:
        return np.empty((0, 3), dtype=np.int64)
    runs = np.concatenate(found)
    return _merge(runs[np.argsort(runs[:, 0], kind="stable")])


def _corners(boxes: Sequence[Box]) -> tuple[_Ints, _Ints]:
    shape = (len(boxes), len(boxes[0].start))
    starts = np.array([box.start for box in boxes], dtype=np.int64).reshape(shape)
    stops = np.array([box.stop for box in boxes], dtype=np.int64).reshape(shape)
    return starts, stops


def _crossing_pairs(a: tuple[_Ints, _Ints], b: tuple[_Ints, _Ints]) -> _Ints:
    """Return the pairs [n, 2] of box numbers of a and b that share an element, in order."""
    pairs = _neighbours(a, b)
    for dim in range(a[0].shape[1]):
        first = np.maximum(a[0][pairs[:, 0], dim], b[0][pairs[:, 1], dim])
        last = np.minimum(a[1][pairs[:, 0], dim], b[1][pairs[:, 1], dim])
        pairs = pairs[first < last]
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


def _neighbours(a: tuple[_Ints, _Ints], b: tuple[_Ints, _Ints]) -> _Ints:
    """Return the pairs that may cross: those that meet in the dim with the most places.

    A fused parameter that is cut along a later dim has a box in every row: all pairs of them would
    be too many to look at.
    """
    num_dims = a[0].shape[1]
    if num_dims == 0:
        counts = np.full(len(a[0]), len(b[0]), dtype=np.int64)
        return _pairs_of(np.zeros(len(a[0]), dtype=np.int64), counts, np.arange(len(b[0])))
    dim = max(range(num_dims), key=lambda dim: len(np.unique(b[0][:, dim])))
    order = np.argsort(b[0][:, dim], kind="stable")
    reached = np.maximum.accumulate(b[1][order, dim])
    first = np.searchsorted(reached, a[0][:, dim], side="right")
    last = np.searchsorted(b[0][order, dim], a[1][:, dim], side="left")
    return _pairs_of(first, np.maximum(last - first, 0), order)


def _pairs_of(first: _Ints, counts: _Ints, order: _Ints) -> _Ints:
    """Return (number of a, order[first[number] + i]) for every i below counts[number]."""
    of_a = np.repeat(np.arange(len(counts)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    at = np.repeat(first, counts) + np.arange(len(of_a)) - before
    return np.stack([of_a, order[at]], axis=1).astype(np.int64, copy=False)


def _runs_of_pair(a: tuple[int, Box], b: tuple[int, Box]) -> _Ints:
    """Return the runs of the intersection of two boxes that are known to cross."""
    both = a[1].intersect(b[1])
    assert both is not None, "only crossing boxes come here"
    length, outer = _split_run(both, a[1], b[1])
    at_a = a[0] + _offsets(both, a[1], outer)
    at_b = b[0] + _offsets(both, b[1], outer)
    return np.stack([at_a, at_b, np.full_like(at_a, length)], axis=1)


def _split_run(both: Box, a: Box, b: Box) -> tuple[int, int]:
    """Return the elements that are contiguous in both boxes and the number of dims around them."""
    length = 1
    outer = len(both.start)
    for size, size_a, size_b in zip(
        reversed(both.shape), reversed(a.shape), reversed(b.shape), strict=True
    ):
        length *= size
        outer -= 1
        if size != size_a or size != size_b:
            break
    return length, outer


def _offsets(both: Box, box: Box, outer: int) -> _Ints:
    """Return where in ``box`` each row of ``both`` begins; rows vary in the first outer dims."""
    strides = [*itertools.accumulate(reversed(box.shape[1:]), initial=1, func=lambda x, y: x * y)]
    strides.reverse()
    offsets = np.zeros(1, dtype=np.int64)
    for dim, stride in enumerate(strides[: len(box.shape)]):
        skipped = both.start[dim] - box.start[dim]
        steps = np.arange(both.shape[dim] if dim < outer else 1, dtype=np.int64)
        offsets = (offsets[:, None] + (skipped + steps) * stride).reshape(-1)
    return offsets


def _merge(runs: _Ints) -> _Ints:
    """Join runs that continue the one before in both orders."""
    if len(runs) == 0:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    begins = np.ones(len(runs), dtype=np.bool_)
    begins[1:] = (runs[1:, :2] != ends).any(axis=1)
    heads = np.flatnonzero(begins)
    merged = runs[heads]
    merged[:, 2] = np.add.reduceat(runs[:, 2], heads)
    return merged
