"""Shapes of a fall: what is left of the way, as a function of the part that is done."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from trainwright.stability_guards.errors import GuardError

Shape = Callable[[float], float]
"""Maps 0 to 1 and 1 to 0 without ever rising."""


def stay(done: float) -> float:
    """Return 1: no fall at all."""
    return 1.0


def straight(done: float) -> float:
    """Fall in a straight line."""
    return 1.0 - done


def half_cosine(done: float) -> float:
    """Fall along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def one_minus_sqrt(done: float) -> float:
    """Fall fast at first, as 1 - sqrt(done)."""
    return 1.0 - math.sqrt(done)


@attrs.frozen
class Power:
    """Fall as ``(1 - done) ** power``.

    Raises:
        GuardError: the power is not positive.
    """

    power: float = attrs.field(converter=float)

    @power.validator
    def _check_power(self, _: object, value: float) -> None:
        if not 0.0 < value < math.inf:
            raise GuardError(f"power must be positive and finite, got {value!r}")

    def __call__(self, done: float) -> float:
        """Return what is left."""
        return math.pow(1.0 - done, self.power)


def shape_name(shape: Shape) -> str:
    """Return how a schedule shows its shape."""
    return str(getattr(shape, "__name__", shape))
