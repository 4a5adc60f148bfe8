"""Schedules without an end, and schedules made of others."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import attrs

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.ramps import BatchRamp
from trainwright.stability_guards.schedules import Rates, check_rate, check_span, check_steps
from trainwright.stability_guards.shapes import Shape, shape_name, straight


@attrs.frozen
class InverseSqrt:
    """A linear rise, then a fall with the square root of the number of updates, without an end.

    Update k >= ``warmup_steps`` gets ``peak / sqrt(1 + (k - warmup_steps) / timescale)``, which
    with the default timescale is ``peak * sqrt(warmup_steps / k)``.

    Args:
        peak: the greatest rate.
        warmup_steps: updates of the rise, as in `WarmupSchedule`.
        timescale: updates after the rise until the rate has fallen by sqrt(2); None takes
            ``warmup_steps``, or 10,000 without a rise.
        floor: the least rate after the rise.
        from_zero: as in `WarmupSchedule`.

    Raises:
        GuardError: a rate is negative, the floor above the peak, or a length no whole number.

    Source:
        Vaswani et al., Attention Is All You Need (2017), section 5.3.
    """

    peak: float = attrs.field(validator=check_rate)
    warmup_steps: int = attrs.field(validator=check_steps)
    timescale: int | None = attrs.field(
        default=None, validator=attrs.validators.optional(check_steps)
    )
    floor: float = attrs.field(default=0.0, validator=check_rate)
    from_zero: bool = False

    def __attrs_post_init__(self) -> None:
        if self.timescale == 0:
            raise GuardError("timescale must be at least 1, got 0; None takes warmup_steps")
        if self.floor > self.peak:
            raise GuardError(f"floor must be at most peak={self.peak}, got {self.floor}")

    def __call__(self, update: int) -> float:
        """Return the rate of the update with this number, counted from 0."""
        return self.over(update, operator.index(update) + 1)

    def over(self, start: int, stop: int) -> float:
        """Return the rate of an update that consumes the units from start to stop, exclusive."""
        start, stop = check_span(start, stop)
        if start < self.warmup_steps:
            risen = start if self.from_zero else min(stop, self.warmup_steps)
            return self.peak * (risen / self.warmup_steps)
        scale = self.timescale or self.warmup_steps or 10_000
        done = (start - self.warmup_steps) / scale
        return max(self.floor, self.peak / math.sqrt(1.0 + done))


@attrs.frozen
class Transition:
    """A value that goes from one level to another and stays: of weight decay, of a shrink factor.

    Args:
        first: value up to update ``begin``.
        last: value from update ``begin + length`` on, greater or smaller.
        begin: update at which it begins to change.
        length: updates of the change; 0 jumps at ``begin``.
        shape: the part of the way that is left, of the part of ``length`` that is done.
    """

    first: float = attrs.field(validator=check_rate)
    last: float = attrs.field(validator=check_rate)
    begin: int = attrs.field(validator=check_steps)
    length: int = attrs.field(validator=check_steps)
    shape: Shape = attrs.field(default=straight, repr=shape_name)

    @property
    def peak(self) -> float:
        """The greatest value."""
        return max(self.first, self.last)

    def __call__(self, update: int) -> float:
        """Return the value at the update with this number, counted from 0."""
        return self.over(update, operator.index(update) + 1)

    def over(self, start: int, stop: int) -> float:
        """Return the value at an update that consumes the units from start to stop, exclusive."""
        start, _ = check_span(start, stop)
        if start < self.begin:
            return self.first
        if start >= self.begin + self.length:
            return self.last
        left = self.shape((start - self.begin) / self.length)
        low, high = sorted((self.first, self.last))
        return min(high, max(low, self.first * left + self.last * (1.0 - left)))


@attrs.frozen
class Chain:
    """Schedules one after the other, each counting from its own beginning.

    Args:
        parts: (schedule, length in updates or units); the last has None: it never ends.
    """

    parts: tuple[tuple[Rates, int | None], ...] = attrs.field()

    @parts.validator
    def _check_parts(self, _: object, parts: tuple[tuple[Rates, int | None], ...]) -> None:
        lengths = [length for _, length in parts]
        if not parts or lengths[-1] is not None or any(n is None or n < 0 for n in lengths[:-1]):
            raise GuardError(f"all parts but the last need a length from 0, got {lengths}")

    @property
    def peak(self) -> float:
        """The greatest peak."""
        return max(schedule.peak for schedule, _ in self.parts)

    def __call__(self, update: int) -> float:
        """Return the rate of the update with this number, counted from 0."""
        return self.over(update, operator.index(update) + 1)

    def over(self, start: int, stop: int) -> float:
        """Return the rate of an update that consumes the units from start to stop, exclusive."""
        start, stop = check_span(start, stop)
        begun = 0
        for schedule, length in self.parts[:-1]:
            assert length is not None
            if start < begun + length:
                return schedule.over(start - begun, stop - begun)
            begun += length
        return self.parts[-1][0].over(start - begun, stop - begun)


def chain(*parts: tuple[Rates, int], last: Rates) -> Rates:
    """Return the schedule that follows each part for its length, then ``last`` for ever.

    ``chain(last=schedule)`` is the schedule itself; a part that is a chain may be nested.
    """
    ended: Iterable[tuple[Rates, int | None]] = ((rates, length) for rates, length in parts)
    return Chain((*ended, (last, None))) if parts else last


@attrs.frozen
class OverRamp:
    """A schedule by samples or tokens, as one by updates whose batches a ramp determines.

    Args:
        schedule: its lengths are in the ramp's units.
        ramp: how much each update consumes.
    """

    schedule: Rates
    ramp: BatchRamp

    @property
    def peak(self) -> float:
        """The greatest rate."""
        return self.schedule.peak

    def __call__(self, update: int) -> float:
        """Return the rate of the update with this number, counted from 0."""
        return self.over(update, operator.index(update) + 1)

    def over(self, start: int, stop: int) -> float:
        """Return the rate of the updates from start to stop, exclusive, made as one."""
        start, stop = check_span(start, stop)
        return self.schedule.over(self.ramp.consumed(start), self.ramp.consumed(stop))
