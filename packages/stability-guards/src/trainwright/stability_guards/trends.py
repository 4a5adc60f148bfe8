"""What shows over many steps: a loss that grows, one that stands still, signals out of bounds."""

from __future__ import annotations

import math

import attrs

from trainwright.stability_guards.checks import positive, whole
from trainwright.stability_guards.protocol import Report, State, Verdict
from trainwright.stability_guards.running import middle_and_spread


@attrs.frozen
class DivergenceGuard:
    """Speaks where the loss rises and goes on rising, and where it has jumped up and stays.

    A point is the median of ``block`` losses, a level the mean of three points; the last 33 points
    are looked at, at the end of each block. The guard speaks where the level is ``rise`` above the
    least of them and has risen by ``trend`` even without its steepest stretch of six blocks, and by
    a fifth of that without its two steepest: a change of the data mixture or a restart lifts the
    loss in one stretch, a divergence in all. A level ``jump`` above the least needs no more. Where
    losses are noisier than those that the defaults were tuned on, both must also be so many spreads
    of the losses inside of a block.

    A rise that takes more than 33 blocks to show is for a second guard, with longer ones.

    Args:
        rise: part of the least level above which the guard looks closer.
        jump: part of the least level above which it speaks at once.
        trend: part of the least level by which the level must have risen without a stretch.
        noise: spreads by which it must have so risen; six times as many for a jump.
        block: steps whose median is a point.
        signal: what is watched.
        verdict: what it says.
    """

    rise: float = attrs.field(default=0.05, validator=positive)
    jump: float = attrs.field(default=0.3, validator=positive)
    trend: float = attrs.field(default=0.05, kw_only=True, validator=positive)
    noise: float = attrs.field(default=2.5, kw_only=True, validator=positive)
    block: int = attrs.field(default=10, kw_only=True, validator=whole(4))
    signal: str = attrs.field(default="loss", kw_only=True)
    verdict: Verdict = attrs.field(default=Verdict.ROLLBACK, kw_only=True, converter=Verdict)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"values": [], "points": [], "spreads": [], "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Take the loss in; judge the level at the end of a block."""
        value = report.value(self.signal)
        if value is None or not math.isfinite(value):
            return {**state, "reason": ""}, Verdict.CONTINUE
        values = [*state["values"], value]
        after = {**state, "values": values, "reason": ""}
        if len(values) < self.block:
            return after, Verdict.CONTINUE
        point, spread = middle_and_spread(sorted(values))
        points = [*state["points"], point][-_POINTS:]
        spreads = [*state["spreads"], spread][-_POINTS:]
        after.update(values=[], points=points, spreads=spreads)
        text = self._fault(points, self.noise * sorted(spreads)[len(spreads) // 2])
        if not text or self.verdict is Verdict.CONTINUE:
            return after, Verdict.CONTINUE
        after["reason"] = f"step {report.step}: {self.signal} is at {text}"
        return after, self.verdict

    def reason(self, state: State) -> str:
        """Say where the level is and where it was."""
        return str(state["reason"])

    def _fault(self, points: list[float], noise: float) -> str:
        """Say what is wrong with the level; nothing where nothing is."""
        if len(points) <= _SMOOTHED:
            return ""
        levels = [
            sum(points[at : at + _SMOOTHED]) / _SMOOTHED
            for at in range(len(points) - _SMOOTHED + 1)
        ]
        level, least = levels[-1], min(levels)
        # The unit of a loss that is negative or zero at its best.
        unit = max(abs(least), 1e-30)
        if level - least > max(self.jump * unit, _NOISE_OF_JUMP * noise):
            return f"{level:.4g}, {self.jump:.0%} above its minimum {least:.4g}"
        if level - least <= self.rise * unit or len(points) < _POINTS:
            return ""
        one, two = _rises_without_stretches(levels[::_SMOOTHED])
        if one <= max(self.trend * unit, noise) or two <= 0.2 * self.trend * unit:
            return ""
        return f"{level:.4g}, above its minimum {least:.4g}, and has risen all the way"


def _rises_without_stretches(levels: list[float]) -> tuple[float, float]:
    """Return the rise from first to last without its steepest stretch, and without its two."""
    # A step in the middle of a level shows in the two changes beside it.
    stretches = [later - earlier for earlier, later in zip(levels, levels[2:], strict=False)]
    whole_rise = levels[-1] - levels[0]
    apart = [one + two for at, one in enumerate(stretches) for two in stretches[at + 2 :]]
    return whole_rise - max(stretches), whole_rise - max(apart)


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


_POINTS = 33
_SMOOTHED = 3  # points of a level
_NOISE_OF_JUMP = 6.0
_MEDIAN_STEPS = 50
_PARTS = 8
