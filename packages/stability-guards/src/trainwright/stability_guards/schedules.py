"""Learning-rate schedules: pure functions of the number of applied updates."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import attrs

from trainwright.stability_guards.errors import GuardError


def constant(peak: float, warmup_steps: int = 0) -> WarmupSchedule:
    """Rise to ``peak`` in ``warmup_steps`` updates and stay there."""
    return WarmupSchedule(peak, warmup_steps, None, peak, _stay)


def linear(peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0) -> WarmupSchedule:
    """Rise to ``peak``, then fall in a straight line to ``floor`` at update ``total_steps``."""
    return WarmupSchedule(peak, warmup_steps, total_steps, floor, _straight)


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0
) -> WarmupSchedule:
    """Rise to ``peak``, then fall along half a cosine to ``floor`` at update ``total_steps``.

    Source:
        Loshchilov and Hutter, SGDR (2017), equation 5, without restarts.
    """
    return WarmupSchedule(peak, warmup_steps, total_steps, floor, _half_cosine)


def as_lambda_lr(schedule: WarmupSchedule) -> Callable[[int], float]:
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


def _check_steps(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise GuardError(
            f"{attribute.name} must be a whole number of updates from 0, got {value!r}; a fraction "
            "of the run must be multiplied out first"
        )


def _check_rate(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.0 <= value < math.inf:
        raise GuardError(f"{attribute.name} must be from 0 and finite, got {value!r}")


def _function_name(function: Callable[[float], float]) -> str:
    return function.__name__.lstrip("_")


@attrs.frozen
class WarmupSchedule:
    """A linear rise, a fall of some shape, and a floor held for ever after; in closed form.

    Update k, counted from 0, gets ``peak * (k + 1) / warmup_steps`` during the rise, so that no
    update has rate 0 and the last of the rise has the peak; update ``warmup_steps`` begins the fall
    at the peak, update ``total_steps`` and all later ones have ``floor``. Without a rise the first
    update has the peak, whatever ``total_steps``. Being pure, it resumes by the update's number.

    Args:
        peak: the greatest rate.
        warmup_steps: updates of the rise.
        total_steps: rise and fall together; None to stay at the peak.
        floor: the rate after the fall.
        shape: the part of the way from floor to peak that is left, of the part of the fall done.

    Raises:
        GuardError: a rate is negative, the floor above the peak, or the rise longer than the run.
    """

    peak: float = attrs.field(validator=_check_rate)
    warmup_steps: int = attrs.field(validator=_check_steps)
    total_steps: int | None = attrs.field(validator=attrs.validators.optional(_check_steps))
    floor: float = attrs.field(validator=_check_rate)
    shape: Callable[[float], float] = attrs.field(repr=_function_name)

    def __attrs_post_init__(self) -> None:
        if self.floor > self.peak:
            raise GuardError(f"floor must be at most peak={self.peak}, got {self.floor}")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise GuardError(
                f"warmup_steps must be at most total_steps={self.total_steps}, "
                f"got {self.warmup_steps}"
            )

    def __call__(self, update: int) -> float:
        """Return the rate of the update with this number, counted from 0."""
        number = operator.index(update)
        if number < 0:
            raise GuardError(f"updates are counted from 0, got {number}")
        if number < self.warmup_steps:
            return self.peak * ((number + 1) / self.warmup_steps)
        # Without a rise, update 0 stands for its end.
        done = number - self.warmup_steps
        if self.total_steps is None or number == 0:
            return self.peak
        if number >= self.total_steps:
            return self.floor
        left = self.shape(done / (self.total_steps - self.warmup_steps))
        between = self.peak * left + self.floor * (1.0 - left)
        # Rounding must not lead past the peak, nor below the floor.
        return min(self.peak, max(self.floor, between))


def _stay(done: float) -> float:
    return 1.0


def _straight(done: float) -> float:
    return 1.0 - done


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))
