"""Batch sizes that grow during a run, with exact counts of what has been consumed."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable

import attrs

from trainwright.stability_guards.errors import GuardError


def fixed_batch(size: int) -> BatchRamp:
    """Return the ramp of a run whose batches are all of one size."""
    return BatchRamp(((0, size),))


def stepwise_ramp(first: int, last: int, increment: int, over: int) -> BatchRamp:
    """Grow from ``first`` to ``last`` by ``increment``, in equal stages of consumption.

    The size is ``first + increment * k`` from the k-th part of ``over`` on, where the parts are as
    many as the increments; an update whose batch begins before a stage's end keeps its size.

    Args:
        first: size of the first batches, in samples or tokens.
        last: size from ``over`` on; ``last - first`` is a multiple of ``increment``.
        increment: growth at each stage.
        over: samples or tokens of the whole ramp.

    Raises:
        GuardError: sizes are not positive or do not fit.
    """
    _check_sizes(first, last, increment, over)
    stages, rest = divmod(last - first, increment)
    if rest:
        raise GuardError(
            f"last - first must be a multiple of increment={increment}, got {last} - {first} = "
            f"{last - first}"
        )
    # The first whole unit at which k parts of the ramp are consumed.
    begins = [-(-k * over // stages) for k in range(1, stages + 1)]
    sizes = [first + increment * k for k in range(1, stages + 1)]
    return _ramp(first, begins, sizes)


def linear_ramp(first: int, last: int, over: int, multiple_of: int = 1) -> BatchRamp:
    """Grow from ``first`` to ``last`` in proportion to what has been consumed, rounded down.

    Args:
        first: size of the first batches, in samples or tokens.
        last: size from ``over`` on.
        over: samples or tokens of the whole ramp.
        multiple_of: what sizes are a multiple of: data ranks times microbatches, in tokens times
            the length of a sequence; ``first`` and ``last`` are.

    Raises:
        GuardError: sizes are not positive or do not fit.
    """
    _check_sizes(first, last, multiple_of, over)
    if first % multiple_of or last % multiple_of:
        raise GuardError(
            f"first and last must be multiples of multiple_of={multiple_of}, got {first} and {last}"
        )
    sizes = range(first + multiple_of, last + 1, multiple_of)
    # The first whole unit at which the line has reached a size.
    begins = [-(-(size - first) * over // (last - first)) for size in sizes]
    return _ramp(first, begins, list(sizes))


def _to_stages(stages: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple((operator.index(start), operator.index(size)) for start, size in stages)


@attrs.frozen
class BatchRamp:
    """Sizes of batches by what has been consumed before: pure, exact, resumed by one number.

    Units are samples or tokens, whichever the numbers are in. A batch keeps the size with which it
    begins, so stages end up to a batch late and nothing is cut. Only applied updates count.

    Args:
        stages: (consumed, size): batches that begin from ``consumed`` on have this size, up to the
            next stage; consumed rises from 0.

    Raises:
        GuardError: no stage begins at 0, stages are out of order, or a size is not positive.
    """

    stages: tuple[tuple[int, int], ...] = attrs.field(converter=_to_stages)
    _begins: tuple[tuple[int, int, int], ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        starts = [start for start, _ in self.stages]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise GuardError(f"stages must begin at 0 and rise, got {starts[:5]}")
        if any(size < 1 for _, size in self.stages):
            raise GuardError(f"sizes must be at least 1, got {[size for _, size in self.stages]}")
        # (first update, consumed before it, size) of each stage that any batch begins in.
        begins: list[tuple[int, int, int]] = []
        update = consumed = 0
        for index, (_, size) in enumerate(self.stages):
            end = starts[index + 1] if index + 1 < len(starts) else None
            if end is not None and end <= consumed:
                continue
            begins.append((update, consumed, size))
            if end is not None:
                batches = -(-(end - consumed) // size)
                update += batches
                consumed += batches * size
        object.__setattr__(self, "_begins", tuple(begins))

    def size_at(self, consumed: int) -> int:
        """Return the size of a batch that begins once ``consumed`` units are consumed."""
        if operator.index(consumed) < 0:
            raise GuardError(f"consumed must be from 0, got {consumed}")
        return self.stages[bisect_right(self.stages, consumed, key=lambda s: s[0]) - 1][1]

    def size(self, update: int) -> int:
        """Return the size of the batch of the update with this number, counted from 0."""
        return self._begun(update)[2]

    def consumed(self, update: int) -> int:
        """Return what the updates before this one have consumed: the sum of their sizes."""
        first, consumed, size = self._begun(update)
        return consumed + (update - first) * size

    def updates(self, total: int) -> int:
        """Return the least number of updates that consume at least ``total`` units."""
        if operator.index(total) < 0:
            raise GuardError(f"total must be from 0, got {total}")
        place = bisect_right(self._begins, total, key=lambda begin: begin[1]) - 1
        first, consumed, size = self._begins[place]
        return first + -(-(total - consumed) // size)

    def _begun(self, update: int) -> tuple[int, int, int]:
        if operator.index(update) < 0:
            raise GuardError(f"updates are counted from 0, got {update}")
        return self._begins[bisect_right(self._begins, update, key=lambda begin: begin[0]) - 1]


def _check_sizes(first: int, last: int, step: int, over: int) -> None:
    named = {"first": first, "last": last, "increment or multiple_of": step}
    for name, value in named.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GuardError(f"{name} must be a whole number from 1, got {value!r}")
    if not isinstance(over, int) or over < 0:
        raise GuardError(f"over must be a whole number of units from 0, got {over!r}")
    if last < first:
        raise GuardError(f"last must be at least first={first}, got {last}")


def _ramp(first: int, begins: list[int], sizes: list[int]) -> BatchRamp:
    # Of several sizes that begin at one unit the last holds.
    stages = dict(zip([0, *begins], [first, *sizes], strict=True))
    return BatchRamp(tuple(stages.items()))
