"""Spikes of loss and norm together, weighed by how rare both are."""

from __future__ import annotations

import math

import attrs

from trainwright.stability_guards.checks import positive, whole
from trainwright.stability_guards.protocol import Report, State, Verdict
from trainwright.stability_guards.running import count_of, median_of, no_values, with_value
from trainwright.stability_guards.spikes import score_of

_CROSSED = 0.25  # weight of two scores that are a step apart
_SMALL = 0.1  # weight of a loss that is hardly higher in proportion, however steady it was before


@attrs.frozen
class JointSpikeGuard:
    """Speaks where loss and norm are both far up within two steps.

    Scores are those of `SpikeGuard`. Under noise with Student's t tails of 3 degrees of freedom a
    score has the chance of its cube's inverse, and two that do not depend on each other that of
    their product's: so the product is the evidence, a quarter of it where the two are a step apart.
    One signal alone counts where no such noise would bring it in a run.

    Args:
        evidence: product of both scores from which the step is a spike.
        least_loss_ratio: with a loss that is not this many times its median, a tenth of the product
            counts.
        least_score: and each is at least this.
        least_norm_ratio: and the norm is at least this many times its median.
        alone: score from which one signal suffices.
        window: values that the quantiles are of.
        min_history: values below which the guard is silent.
        verdict: what it says.
    """

    evidence: float = attrs.field(default=80.0, validator=positive)
    least_loss_ratio: float = attrs.field(default=1.25, kw_only=True, validator=positive)
    least_score: float = attrs.field(default=4.0, kw_only=True, validator=positive)
    least_norm_ratio: float = attrs.field(default=2.3, kw_only=True, validator=positive)
    alone: float = attrs.field(default=400.0, kw_only=True, validator=positive)
    window: int = attrs.field(default=128, kw_only=True, validator=whole(4))
    min_history: int = attrs.field(default=32, kw_only=True, validator=whole(1))
    verdict: Verdict = attrs.field(default=Verdict.SKIP, kw_only=True, converter=Verdict)

    def initial(self) -> State:
        """Return the state before the first step."""
        return {
            "loss": no_values(),
            "norm": no_values(),
            "scores": [0.0, 0.0],
            "evidence": 0.0,
            "reason": "",
        }

    def update(self, state: State, report: Report) -> tuple[State, Verdict]:
        """Judge loss and norm by the values before them, then take them in."""
        loss, loss_score = self._taken(state["loss"], report, "loss", 1.0)
        is_small = report.loss < self.least_loss_ratio * median_of(state["loss"])
        weighed = loss_score * (_SMALL if is_small else 1.0)
        norm, norm_score = self._taken(state["norm"], report, "norm", self.least_norm_ratio)
        loss_before, norm_before = state["scores"]
        # One of them may be a step late, but that is twice as many chances for noise to pair.
        crossed = max(weighed * norm_before, loss_before * norm_score)
        evidence = max(weighed * norm_score, _CROSSED * crossed)
        alone = max(loss_score, norm_score)
        after = {
            "loss": loss,
            "norm": norm,
            "scores": [weighed, norm_score],
            "evidence": evidence,
            "reason": "",
        }
        bad = evidence >= self.evidence or alone >= self.alone
        if not bad or self.verdict is Verdict.CONTINUE:
            return after, Verdict.CONTINUE
        after["reason"] = (
            f"step {report.step}: loss {report.loss:.4g} and norm {report.norm:.4g}, scores "
            f"{loss_score:.1f} and {norm_score:.1f} above medians {median_of(state['loss']):.4g} "
            f"and {median_of(state['norm']):.4g}"
        )
        return after, self.verdict

    def reason(self, state: State) -> str:
        """Say loss and norm, and how far each is above its median."""
        return str(state["reason"])

    def _taken(
        self, values: State, report: Report, signal: str, least_ratio: float
    ) -> tuple[State, float]:
        value = report.value(signal)
        if value is None or not math.isfinite(value):
            return values, 0.0
        after = with_value(values, value, self.window)
        if count_of(values) < min(self.min_history, self.window):
            return after, 0.0
        score = score_of(values, value)
        big = score >= self.least_score and value >= least_ratio * median_of(values)
        return after, score if big else 0.0
