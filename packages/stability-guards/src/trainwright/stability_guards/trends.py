"""What shows over many steps: a loss that grows, one that stands still, signals out of bounds."""

from __future__ import annotations

import math

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


@attrs.frozen
class DivergenceGuard:
    """Speaks where the loss has risen above its minimum and goes on rising.

    The level is the median of the last ``block`` losses. Once it is ``rise`` above its minimum the
    guard takes the level of the next full block as its anchor, and speaks if within two more
    blocks the level is above the anchor by ``trend`` and by ``noise`` spreads: two signals that
    agree, the level and its trend. A level that does not go on rising, as after a change of the
    data mixture or a restart, is the new minimum. A level ``jump`` above the minimum needs no
    trend.

    Args:
        rise: part of the minimum above which the guard looks closer.
        jump: part of the minimum above which it speaks at once.
        trend: part of the anchor by which the level must rise further.
        noise: spreads of the losses by which it must rise further.
        block: steps whose median is the level.
        signal: what is watched.
        verdict: what it says.
    """

    rise: float = attrs.field(default=0.05, validator=positive)
    jump: float = attrs.field(default=0.3, validator=positive)
    trend: float = attrs.field(default=0.01, kw_only=True, validator=positive)
    noise: float = attrs.field(default=0.5, kw_only=True, validator=positive)
    block: int = attrs.field(default=40, kw_only=True, validator=whole(4))
    signal: str = attrs.field(default="loss", kw_only=True)
    verdict: Verdict = attrs.field(default=Verdict.ROLLBACK, kw_only=True, converter=Verdict)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"values": no_values(), "least": None, "since": None, "anchor": None, "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Take the loss in and judge the level."""
        value = report.value(self.signal)
        if value is None or not math.isfinite(value):
            return {**state, "reason": ""}, Verdict.CONTINUE
        values = with_value(state["values"], value, self.block)
        after = {**state, "values": values, "reason": ""}
        if count_of(values) < self.block:
            return after, Verdict.CONTINUE
        level = median_of(values)
        least = level if state["least"] is None else min(state["least"], level)
        after["least"] = least
        # The unit of a loss that is negative or zero at its best.
        unit = max(abs(least), 1e-30)
        if level > least + self.jump * unit:
            text = f"{self.jump:.0%} above its minimum {least:.4g}"
        elif self._goes_on(after, level, unit):
            text = f"above its minimum {least:.4g} and rising from {state['anchor']:.4g}"
        else:
            return after, Verdict.CONTINUE
        if self.verdict is Verdict.CONTINUE:
            return after, self.verdict
        after["reason"] = f"step {report.step}: {self.signal} is at {level:.4g}, {text}"
        return after, self.verdict

    def reason(self, state: State) -> str:
        """Say where the level is and where it was."""
        return str(state["reason"])

    def _goes_on(self, state: dict[str, object], level: float, unit: float) -> bool:
        least, since, anchor = state["least"], state["since"], state["anchor"]
        assert isinstance(least, float)
        # Half way down, so that noise about the line does not begin the watch again and again.
        line = self.rise if since is None else 0.5 * self.rise
        if level <= least + line * unit:
            state["since"] = state["anchor"] = None
            return False
        age = since + 1 if isinstance(since, int) else 0
        state["since"] = age
        if age < self.block:
            return False
        if not isinstance(anchor, float):
            state["anchor"] = level
            return False
        values = state["values"]
        assert isinstance(values, dict)
        needed = max(self.trend * unit, self.noise * spread_of(values))
        if age >= 2 * self.block and level > anchor + needed:
            return True
        if age >= 3 * self.block:
            state.update(least=level, since=None, anchor=None)
        return False


@attrs.frozen
class StallGuard:
    """Speaks where the loss has stood still for a long time, however noisy it is.

    The last ``patience`` steps are cut into eight parts; the level of a part is the mean of the
    medians of fifty steps each. The guard speaks where the two halves' mean levels are within
    ``least_change`` of each other and all parts within ten times that: a loss that has risen and
    fallen is not stalled. A run near its end, whose true progress is as small, cannot be told
    from a stalled one: choose ``patience`` so that it would show.

    Args:
        patience: steps looked at, at least 400.
        least_change: part of the level.
        signal: what is watched.
        verdict: what it says; another batch cannot help.
    """

    patience: int = attrs.field(default=20_000, validator=whole(400))
    least_change: float = attrs.field(default=5e-4, validator=positive)
    signal: str = attrs.field(default="loss", kw_only=True)
    verdict: Verdict = attrs.field(default=Verdict.HALT, kw_only=True, converter=Verdict)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"values": [], "medians": 0, "sum": 0.0, "parts": [], "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Take the value in; judge at the end of each part."""
        value = report.value(self.signal)
        if value is None or not math.isfinite(value):
            return {**state, "reason": ""}, Verdict.CONTINUE
        values = [*state["values"], value]
        after = {**state, "values": values, "reason": ""}
        if len(values) < _MEDIAN_STEPS:
            return after, Verdict.CONTINUE
        after["values"] = []
        after["sum"] = state["sum"] + sorted(values)[_MEDIAN_STEPS // 2]
        after["medians"] = state["medians"] + 1
        if after["medians"] * _MEDIAN_STEPS * _PARTS < self.patience:
            return after, Verdict.CONTINUE
        parts = [*state["parts"], after["sum"] / after["medians"]][-_PARTS:]
        after.update(medians=0, sum=0.0, parts=parts)
        if not self._stands_still(parts) or self.verdict is Verdict.CONTINUE:
            return after, Verdict.CONTINUE
        after["reason"] = (
            f"step {report.step}: {self.signal} has stood at {parts[-1]:.4g} for {self.patience} "
            "steps"
        )
        return after, self.verdict

    def reason(self, state: State) -> str:
        """Say at which level it stands and for how long."""
        return str(state["reason"])

    def _stands_still(self, parts: list[float]) -> bool:
        if len(parts) < _PARTS:
            return False
        half = _PARTS // 2
        change = abs(sum(parts[half:]) - sum(parts[:half])) / half
        bound = self.least_change * abs(sum(parts)) / _PARTS
        return change <= bound and max(parts) - min(parts) <= 10.0 * bound


_MEDIAN_STEPS = 50
_PARTS = 8
