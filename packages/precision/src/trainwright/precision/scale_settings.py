"""What a loss scaler is told: numbers, and their ranges."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from trainwright.precision.errors import PrecisionError


@attrs.frozen
class Hysteresis:
    """How many overflows the scale bears before it falls.

    The overflow numbered ``overflows`` lowers it, and each that follows lowers it again, until the
    count is refilled: when the scale grows, and, with ``refills``, at every clean step.

    Args:
        overflows: at least 1, which lowers the scale at every overflow.
        refills: False counts overflows since the scale last grew, as Megatron-LM does; DeepSpeed
            calls True ``consecutive_hysteresis``: only overflows in a row lower the scale.

    Raises:
        PrecisionError: the number of overflows is none, or ``refills`` no bool.
    """

    overflows: int = attrs.field()
    refills: bool = attrs.field(default=False)

    @overflows.validator
    def _check_overflows(self, _: object, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(f"hysteresis must be a whole number from 1, got {value!r}")

    @refills.validator
    def _check_refills(self, _: object, value: bool) -> None:
        if not isinstance(value, bool):
            raise PrecisionError(f"refills must be True or False, got {value!r}")


@attrs.frozen
class Settings:
    """The numbers that say how the scale follows, as in a state."""

    growth_factor: float = attrs.field()
    backoff_factor: float = attrs.field()
    growth_interval: int = attrs.field()
    hysteresis: int = 1
    hysteresis_refills: bool = False

    def __attrs_post_init__(self) -> None:
        Hysteresis(self.hysteresis, self.hysteresis_refills)

    @growth_factor.validator
    def _check_growth_factor(self, _: object, value: float) -> None:
        if not (1.0 < as_float("growth_factor", value) < float("inf")):
            raise PrecisionError(f"growth_factor must be above 1 and finite, got {value}")

    @backoff_factor.validator
    def _check_backoff_factor(self, _: object, value: float) -> None:
        if not 0.0 < as_float("backoff_factor", value) < 1.0:
            raise PrecisionError(f"backoff_factor must be between 0 and 1, got {value}")

    @growth_interval.validator
    def _check_growth_interval(self, _: object, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PrecisionError(f"growth_interval must be a whole number from 1, got {value!r}")


def as_float(name: str, value: Any) -> float:
    """Return a number, or the number that a tensor or a number of numpy holds, as a float.

    Raises:
        PrecisionError: It is none.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text")
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise PrecisionError(f"{name} must be a number, got {value!r:.80}") from error


def as_count(name: str, value: Any) -> int:
    """Return a whole number from 0 as an int, also where a float or a tensor holds it.

    Raises:
        PrecisionError: It is none.
    """
    number = as_float(name, value)
    if not 0.0 <= number < 2.0**63 or number % 1.0:
        raise PrecisionError(f"{name} must be a whole number from 0, got {value!r:.80}")
    return int(value)


def to_float32(value: float) -> float:
    """Round to float32, in which torch keeps its scale too: the sequences are equal bit for bit."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def positive_float32(name: str, value: float) -> float:
    """Round a scale to float32, or raise if it is not positive and finite there."""
    rounded = to_float32(as_float(name, value))
    if not 0.0 < rounded < float("inf"):
        raise PrecisionError(f"{name} must be positive and finite in float32, got {value}")
    return rounded
