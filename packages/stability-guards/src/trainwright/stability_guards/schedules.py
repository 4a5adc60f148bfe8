"""Learning-rate schedules: pure functions of applied updates, or of tokens, in closed form."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Protocol

import attrs

from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.shapes import (
    Power,
    Shape,
    half_cosine,
    one_minus_sqrt,
    shape_name,
    stay,
    straight,
)


class Rates(Protocol):
    """A rate for each update, counted from 0, and for each span of samples or tokens.

    Law: ``schedule(k) == schedule.over(k, k + 1)``, and with batches of n units and every length n
    times as long, ``schedule.over(n * k, n * (k + 1))`` is the same rate.
    """

    @property
    def peak(self) -> float:
        """The greatest rate."""
        ...

    def __call__(self, update: int) -> float:
        """Return the rate of the update with this number."""
        ...

    def over(self, start: int, stop: int) -> float:
        """Return the rate of an update that consumes the units from start to stop, exclusive."""
        ...


def constant(peak: float, warmup_steps: int = 0, *, from_zero: bool = False) -> WarmupSchedule:
    """Rise to ``peak`` in ``warmup_steps`` updates and stay there."""
    return WarmupSchedule(peak, warmup_steps, None, peak, stay, from_zero=from_zero)


def linear(
    peak: float,
    warmup_steps: int,
    total_steps: int,
    floor: float = 0.0,
    *,
    from_zero: bool = False,
) -> WarmupSchedule:
    """Rise to ``peak``, then fall in a straight line to ``floor`` at update ``total_steps``."""
    return WarmupSchedule(peak, warmup_steps, total_steps, floor, straight, from_zero=from_zero)


def warmup_cosine(
    peak: float,
    warmup_steps: int,
    total_steps: int,
    floor: float = 0.0,
    *,
    from_zero: bool = False,
) -> WarmupSchedule:
    """Rise to ``peak``, then fall along half a cosine to ``floor`` at update ``total_steps``.

    Source:
        Loshchilov and Hutter, SGDR (2017), equation 5, without restarts.
    """
    return WarmupSchedule(peak, warmup_steps, total_steps, floor, half_cosine, from_zero=from_zero)


def polynomial(
    peak: float,
    warmup_steps: int,
    total_steps: int,
    floor: float = 0.0,
    *,
    power: float = 1.0,
    from_zero: bool = False,
) -> WarmupSchedule:
    """Rise to ``peak``, then fall to ``floor`` along the ``power`` of the part that is left."""
    shape = Power(power)
    return WarmupSchedule(peak, warmup_steps, total_steps, floor, shape, from_zero=from_zero)


def warmup_stable_decay(
    peak: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
    floor: float = 0.0,
    *,
    shape: Shape = one_minus_sqrt,
    from_zero: bool = False,
) -> WarmupSchedule:
    """Rise to ``peak``, stay there, and fall to ``floor`` in the last ``decay_steps`` of all.

    Args:
        peak: the greatest rate.
        warmup_steps: updates of the rise.
        total_steps: rise, plateau and fall together.
        decay_steps: updates of the fall.
        floor: the rate after the fall.
        shape: of the fall: `straight`, `half_cosine`, `one_minus_sqrt`, `Power` or your own.
        from_zero: as in `WarmupSchedule`.

    Raises:
        GuardError: rise and fall are together longer than the run.

    Source:
        Hu et al., MiniCPM (2024), section 4; Hägele et al., Scaling Laws and Compute-Optimal
        Training Beyond Fixed Training Durations (2024), equation 2, for 1 - sqrt.
    """
    hold = total_steps - warmup_steps - decay_steps
    if hold < 0:
        raise GuardError(
            f"warmup_steps + decay_steps must be at most total_steps={total_steps}, "
            f"got {warmup_steps} + {decay_steps}"
        )
    return WarmupSchedule(peak, warmup_steps, total_steps, floor, shape, hold, from_zero)


def as_lambda_lr(schedule: Rates) -> Callable[[int], float]:
    """Return the factors for ``torch.optim.lr_scheduler.LambdaLR``: the schedule over its peak.

    Give the optimizer the peak as its learning rate; groups with another one keep its ratio to the
    peak. Step the scheduler after applied updates only.

    Raises:
        GuardError: the peak is zero.
    """
    if schedule.peak == 0.0:
        raise GuardError("as_lambda_lr needs a peak above 0 to be a factor of")

    def factor(update: int) -> float:
        return schedule(update) / schedule.peak

    return factor


def check_span(start: int, stop: int) -> tuple[int, int]:
    """Return the bounds of a span of updates, samples or tokens as ints.

    Raises:
        GuardError: they are negative or out of order.
    """
    first, last = operator.index(start), operator.index(stop)
    if first < 0:
        raise GuardError(f"updates and units are counted from 0, got {first}")
    if last <= first:
        raise GuardError(f"an update consumes at least one unit, got from {first} to {last}")
    return first, last


def check_steps(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    """Refuse what is not a whole number from 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GuardError(
            f"{attribute.name} must be a whole number of updates from 0, got {value!r}; a fraction "
            "of the run must be multiplied out first"
        )


def check_rate(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    """Refuse what is not a finite number from 0."""
    if not 0.0 <= value < math.inf:
        raise GuardError(f"{attribute.name} must be from 0 and finite, got {value!r}")


@attrs.frozen
class WarmupSchedule:
    """A linear rise, a plateau, a fall of some shape, and a floor held for ever after.

    Update k, counted from 0, gets ``peak * (k + 1) / warmup_steps`` during the rise, so that no
    update has rate 0 and the last of the rise has the peak; update ``warmup_steps`` still has the
    peak, update ``total_steps`` and all later ones have ``floor``. Without a rise the first update
    has the peak, whatever ``total_steps``. Being pure, it resumes by the update's number.

    All lengths may be samples or tokens instead, with `over`: the rise goes by the units consumed
    once the update is made, the fall by those before it.

    Args:
        peak: the greatest rate.
        warmup_steps: updates of the rise.
        total_steps: rise, plateau and fall together; None to stay at the peak.
        floor: the rate after the fall.
        shape: the part of the way from floor to peak that is left, of the part of the fall done.
        hold_steps: updates of the plateau before the fall.
        from_zero: let update k of the rise have ``peak * k / warmup_steps`` as in `transformers`,
            whose first update changes no weight; everything after the rise is the same.

    Raises:
        GuardError: a rate is negative, the floor above the peak, or rise and plateau longer than
            the run.
    """

    peak: float = attrs.field(validator=check_rate)
    warmup_steps: int = attrs.field(validator=check_steps)
    total_steps: int | None = attrs.field(validator=attrs.validators.optional(check_steps))
    floor: float = attrs.field(validator=check_rate)
    shape: Shape = attrs.field(repr=shape_name)
    hold_steps: int = attrs.field(default=0, validator=check_steps)
    from_zero: bool = False

    def __attrs_post_init__(self) -> None:
        if self.floor > self.peak:
            raise GuardError(f"floor must be at most peak={self.peak}, got {self.floor}")
        if self.total_steps is not None and self.warmup_steps + self.hold_steps > self.total_steps:
            plateau = f" with hold_steps={self.hold_steps}" if self.hold_steps else ""
            raise GuardError(
                f"warmup_steps must be at most total_steps={self.total_steps}, "
                f"got {self.warmup_steps}{plateau}"
            )

    def __call__(self, update: int) -> float:
        """Return the rate of the update with this number, counted from 0."""
        return self.over(update, operator.index(update) + 1)

    def over(self, start: int, stop: int) -> float:
        """Return the rate of an update that consumes the units from start to stop, exclusive."""
        start, stop = check_span(start, stop)
        if start < self.warmup_steps:
            risen = start if self.from_zero else min(stop, self.warmup_steps)
            return self.peak * (risen / self.warmup_steps)
        # Without a rise, update 0 stands for its end.
        if self.total_steps is None or start == 0:
            return self.peak
        if start >= self.total_steps:
            return self.floor
        top = self.warmup_steps + self.hold_steps
        if start <= top:
            return self.peak
        left = self.shape((start - top) / (self.total_steps - top))
        between = self.peak * left + self.floor * (1.0 - left)
        # Rounding must not lead past the peak, nor below the floor.
        return min(self.peak, max(self.floor, between))
