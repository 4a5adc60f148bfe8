"""Signals that must stay within bounds: update-to-weight ratio, logits, attention logits."""

from __future__ import annotations

import math

import attrs

from trainwright.stability_guards.checks import positive, whole
from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.protocol import Report, State, Verdict
from trainwright.stability_guards.running import count_of, median_of, no_values, with_value


@attrs.frozen
class BoundGuard:
    """Speaks where a signal has been outside of fixed bounds for some observations in a row.

    Args:
        signal: its name in the report, such as ``"update_ratio"``; a report without it changes
            nothing.
        most: greatest value that is right.
        least: least value that is right.
        in_a_row: observations outside before the guard speaks.
        verdict: what it says.

    Raises:
        GuardError: ``least`` is not below ``most``.
    """

    signal: str
    most: float
    least: float = attrs.field(default=-math.inf, kw_only=True)
    in_a_row: int = attrs.field(default=1, kw_only=True, validator=whole(1))
    verdict: Verdict = attrs.field(default=Verdict.SKIP, kw_only=True, converter=Verdict)

    def __attrs_post_init__(self) -> None:
        if not self.least < self.most:
            raise GuardError(f"least must be below most, got {self.least} and {self.most}")

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"outside": 0, "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Count observations outside of the bounds; NaN is outside."""
        value = report.value(self.signal)
        if value is None:
            return {**state, "reason": ""}, Verdict.CONTINUE
        if self.least <= value <= self.most:
            return {"outside": 0, "reason": ""}, Verdict.CONTINUE
        outside = state["outside"] + 1
        if outside < self.in_a_row or self.verdict is Verdict.CONTINUE:
            return {"outside": outside, "reason": ""}, Verdict.CONTINUE
        reason = (
            f"step {report.step}: {self.signal} {value:.4g} is outside of "
            f"[{self.least:.4g}, {self.most:.4g}], {outside} in a row"
        )
        return {"outside": outside, "reason": reason}, self.verdict

    def reason(self, state: State) -> str:
        """Say the value and the bounds."""
        return str(state["reason"])


@attrs.frozen
class GrowthGuard:
    """Speaks where a signal has grown by a factor over a number of observations.

    The level is the median of the last ``block`` observations; the guard speaks at the end of a
    block whose level is ``factor`` times the least level of the ``blocks`` before, and not below
    ``floor``: logits that grow without end do so smoothly, and no single step shows it.

    Args:
        signal: its name in the report, such as ``"logit_max"``.
        factor: growth that is too much.
        floor: level below which growth does not matter.
        block: observations in a block.
        blocks: blocks looked back.
        verdict: what it says.
    """

    signal: str
    factor: float = attrs.field(default=3.0, validator=positive)
    floor: float = attrs.field(default=0.0, kw_only=True)
    block: int = attrs.field(default=50, kw_only=True, validator=whole(1))
    blocks: int = attrs.field(default=20, kw_only=True, validator=whole(1))
    verdict: Verdict = attrs.field(default=Verdict.SKIP, kw_only=True, converter=Verdict)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {"values": no_values(), "levels": [], "reason": ""}

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Take the value in; judge at the end of each block."""
        value = report.value(self.signal)
        if value is None or not math.isfinite(value):
            return {**state, "reason": ""}, Verdict.CONTINUE
        values = with_value(state["values"], value, self.block)
        if count_of(values) < self.block:
            return {**state, "values": values, "reason": ""}, Verdict.CONTINUE
        level, before = median_of(values), state["levels"]
        after = {"values": no_values(), "levels": [*before, level][-self.blocks :], "reason": ""}
        grown = bool(before) and level > self.factor * min(before) and level >= self.floor
        if not grown or self.verdict is Verdict.CONTINUE:
            return after, Verdict.CONTINUE
        after["reason"] = (
            f"step {report.step}: {self.signal} has grown from {min(before):.4g} to {level:.4g}, "
            f"by more than {self.factor:g} times"
        )
        return after, self.verdict

    def reason(self, state: State) -> str:
        """Say from where to where it has grown."""
        return str(state["reason"])
