"""Running quantiles of the last values, as plain data: a step costs a search and two copies."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.stability_guards.errors import GuardError

_IQR_OF_NORMAL = 1.349  # the distance between the quartiles of a normal distribution, in sigmas


def no_values() -> dict[str, Any]:
    """Return the window that has seen nothing."""
    return {"recent": [], "ordered": [], "next": 0}


def with_value(window: Mapping[str, Any], value: float, size: int) -> dict[str, Any]:
    """Return the window after one more finite value, of which it keeps the last ``size``."""
    recent, ordered, place = list(window["recent"]), list(window["ordered"]), window["next"]
    if len(recent) < size:
        recent.append(value)
    else:
        del ordered[bisect_left(ordered, recent[place])]
        recent[place] = value
        place = (place + 1) % size
    insort(ordered, value)
    return {"recent": recent, "ordered": ordered, "next": place}


def check_windows(state: object) -> None:
    """Raise unless every window in a guard's state, at any depth, could have been made here.

    Raises:
        GuardError: One holds something else than finite numbers, or these in another order.
    """
    if isinstance(state, Mapping):
        if state.keys() == no_values().keys():
            _check_window(state)
        for part in state.values():
            check_windows(part)
    elif isinstance(state, list | tuple):
        for part in state:
            check_windows(part)


def _check_window(window: Mapping[str, Any]) -> None:
    recent, ordered, place = window["recent"], window["ordered"], window["next"]
    is_whole = (
        isinstance(recent, list | tuple)
        and all(type(value) in (int, float) and math.isfinite(value) for value in recent)
        and list(ordered) == sorted(recent)
        and type(place) is int
        and 0 <= place < max(len(recent), 1)
    )
    if not is_whole:
        raise GuardError(
            "a window of a guard's state must hold finite numbers, the same ones in order, and the "
            f"place of the oldest, got {window!s:.120}"
        )


def count_of(window: Mapping[str, Any]) -> int:
    """Return how many values the window holds."""
    return len(window["ordered"])


def median_of(window: Mapping[str, Any]) -> float:
    """Return the middle value (the upper one of two), zero where there is none."""
    ordered = window["ordered"]
    return float(ordered[len(ordered) // 2]) if ordered else 0.0


def spread_of(window: Mapping[str, Any]) -> float:
    """Return the distance of the quartiles in units of a normal distribution's sigma."""
    ordered = window["ordered"]
    if not ordered:
        return 0.0
    last = len(ordered) - 1
    return float(ordered[(3 * last + 2) // 4] - ordered[last // 4]) / _IQR_OF_NORMAL


def middle_and_spread(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the median of ordered values, and the distance of their quartiles in sigmas."""
    last = len(ordered) - 1
    middle = 0.5 * ordered[last // 2] + 0.5 * ordered[(last + 1) // 2]
    return middle, (ordered[(3 * last + 2) // 4] - ordered[last // 4]) / _IQR_OF_NORMAL
