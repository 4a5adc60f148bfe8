"""Spikes: values far above what the last steps let expect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from trainwright.stability_guards.checks import positive, whole
from trainwright.stability_guards.protocol import Report, State, Verdict
from trainwright.stability_guards.running import (
    count_of,
    median_of,
    no_values,
    spread_of,
    with_value,
)

_LEAST_SPREAD = 1e-3  # of the median: a signal that hardly moves must not cry at rounding
_MOST_SCORE = 1e12


def score_of(values: Mapping[str, Any], value: float) -> float:
    """Return how many spreads ``value`` is above the median of a window of values."""
    median = median_of(values)
    score = (value - median) / max(spread_of(values), _LEAST_SPREAD * abs(median), 1e-30)
    # States are JSON, which has no infinity.
    return min(score, _MOST_SCORE)


@attrs.frozen
class SpikeGuard:
    """Speaks where a signal is far above its running median, measured by its running spread.

    The score of a value is its distance above the median of the last ``window`` values, in units
    of their spread (that of the quartiles, which equals sigma for normal noise, and at least a
    thousandth of the median). Median and quartiles follow a falling loss, and a burst of fewer than
    a quarter of the window hardly moves them. Every finite value is taken in, those of a spike
    too: where a signal moves to a new level for good, the guard falls silent by itself. Values
    that are not finite are `NonFiniteGuard`'s.

    Heavy-tailed noise makes single high scores common: with Student's t of 3 degrees of freedom
    one value in two million scores above a hundred. Let two signals agree (`agreeing`) at a low
    threshold, or trust one alone at a high one.

    Args:
        signal: ``"loss"``, ``"norm"`` or a name in the report's ``signals``.
        threshold: score from which a value is a spike.
        least_ratio: and it is at least this many times the median.
        window: values that the quantiles are of.
        min_history: values below which the guard is silent.
        verdict: what it says.
    """

    signal: str
    threshold: float = attrs.field(default=12.0, validator=positive)
    least_ratio: float = attrs.field(default=1.0, kw_only=True, validator=positive)
    window: int = attrs.field(default=128, kw_only=True, validator=whole(4))
    min_history: int = attrs.field(default=32, kw_only=True, validator=whole(1))
    verdict: Verdict = attrs.field(default=Verdict.SKIP, kw_only=True, converter=Verdict)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"values": no_values(), "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Judge the step's value by the values before it, then take it in."""
        value = report.value(self.signal)
        if value is None or not math.isfinite(value):
            return {**state, "reason": ""}, Verdict.CONTINUE
        before = state["values"]
        median = median_of(before)
        known = count_of(before) >= min(self.min_history, self.window)
        score = score_of(before, value) if known else 0.0
        after = with_value(before, value, self.window)
        if score < self.threshold or value < self.least_ratio * median:
            return {"values": after, "reason": ""}, Verdict.CONTINUE
        reason = (
            f"step {report.step}: {self.signal} {value:.4g} is {score:.1f} spreads above its "
            f"median {median:.4g}"
        )
        said = reason if self.verdict is not Verdict.CONTINUE else ""
        return {"values": after, "reason": said}, self.verdict

    def reason(self, state: State) -> str:
        """Say how far the value was above the median."""
        return str(state["reason"])
