"""A rectangular part of a tensor, and how ranges of its elements are made of smaller ones."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator

import attrs

from .errors import UsageError


def to_ints(values: Iterable[int]) -> tuple[int, ...]:
    """Return the values as a tuple of plain integers; anything that is not one raises."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise UsageError(f"positions and sizes must be integers, got {values!r}") from error


@attrs.frozen
class Box:
    """The elements of a tensor with ``start[d] <= index[d] < stop[d]`` in every dim ``d``.

    Args:
        start: First index in each dim.
        stop: One past the last index in each dim; equal to ``start`` makes the box empty.

    A tensor without dims has the one box ``Box((), ())``, which holds its one element.

    Raises:
        UsageError: The two differ in length, or some ``0 <= start <= stop`` does not hold.
    """

    start: tuple[int, ...] = attrs.field(converter=to_ints)
    stop: tuple[int, ...] = attrs.field(converter=to_ints)

    def __attrs_post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise UsageError(
                f"a box needs as many starts as stops, got start={self.start} stop={self.stop}"
            )
        for first, end in zip(self.start, self.stop, strict=True):
            if not 0 <= first <= end:
                raise UsageError(
                    f"a box needs 0 <= start <= stop in every dim, "
                    f"got start={self.start} stop={self.stop}"
                )

    @classmethod
    def full(cls, shape: Iterable[int]) -> Box:
        """Return the box that covers a whole tensor of ``shape``."""
        stop = to_ints(shape)
        return cls((0,) * len(stop), stop)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size in each dim."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index a tensor with to get this box of it."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Return the elements in both boxes, or None where there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(operator.ge, start, stop)):
            return None
        return Box(start, stop)

    def check_within(self, shape: tuple[int, ...]) -> None:
        """Raise UsageError unless this is a box of a tensor of ``shape``."""
        if len(self.stop) != len(shape) or any(map(operator.gt, self.stop, shape)):
            raise UsageError(
                f"box {self.start}..{self.stop} does not lie within a tensor of shape {shape}"
            )

    def cut(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the boxes that make up elements [start, stop) of this box, in row-major order.

        A range that begins and ends inside rows is a few boxes (at most ``2 * ndim - 1``): the
        rest of the first row, the whole rows between, the beginning of the last row.
        """
        if start >= stop:
            return
        if start == 0 and stop == self.numel:
            yield self
            return
        yield from _cut_rows(self, 0, start, stop)


def _cut_rows(box: Box, dim: int, start: int, stop: int) -> Iterator[Box]:
    """Cut ``box``, whose dims before ``dim`` have size one; a row is one index of ``dim``."""
    row = math.prod(box.shape[dim + 1 :])
    first = -(-start // row)
    last = stop // row
    if first > last:  # the range begins and ends inside one row
        yield from _cut_rows(_rows(box, dim, last, first), dim + 1, start % row, stop % row)
        return
    if start < first * row:
        yield from _cut_rows(_rows(box, dim, first - 1, first), dim + 1, start % row, row)
    if first < last:
        yield _rows(box, dim, first, last)
    if last * row < stop:
        yield from _cut_rows(_rows(box, dim, last, last + 1), dim + 1, 0, stop % row)


def _rows(box: Box, dim: int, first: int, last: int) -> Box:
    base = box.start[dim]
    return Box(
        (*box.start[:dim], base + first, *box.start[dim + 1 :]),
        (*box.stop[:dim], base + last, *box.stop[dim + 1 :]),
    )
