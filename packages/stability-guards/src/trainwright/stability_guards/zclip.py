"""A bound for the norm that follows the running statistics of norms."""

from __future__ import annotations

import math
from typing import Any

import attrs

from trainwright.stability_guards.checks import positive, whole
from trainwright.stability_guards.errors import GuardError
from trainwright.stability_guards.protocol import State


def _check_share(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise GuardError(f"{attribute.name} must be from 0 and below 1, got {value!r}")


@attrs.frozen
class ZClip:
    """Clips norms that lie many standard deviations above their running mean, the further the more.

    A norm whose distance from the mean is z > ``threshold`` standard deviations is clipped to
    ``mean + threshold**2 / z`` of them. What is clipped enters the statistics as clipped, so a
    spike hardly moves them; a norm that is not finite does not enter them at all.

    Args:
        decay: what is left of the running mean and variance after a step.
        threshold: standard deviations above the mean that pass unclipped.
        warmup: norms from which the first mean and variance are taken; none of them is clipped by
            its distance.
        ceiling: bound that holds beside, in the warm-up too; ``math.inf`` for none.

    Source:
        Kumar, Owen, Roy Chowdhury and Güra, ZClip: Adaptive Spike Mitigation for LLM Pre-Training
        (2025), with its defaults.
    """

    decay: float = attrs.field(default=0.97, validator=_check_share)
    threshold: float = attrs.field(default=2.5, validator=positive)
    warmup: int = attrs.field(default=25, validator=whole(1))
    ceiling: float = attrs.field(default=math.inf, validator=positive)

    def initial(self) -> State:
        """Return the state before the first step: plain JSON data, for checkpoints."""
        return {"first": [], "mean": 0.0, "variance": 0.0}

    def update(self, state: State, norm: float) -> tuple[State, float]:
        """Return the state after a step with this norm, and the bound that clips it.

        Args:
            state: of the step before.
            norm: global norm before clipping, on the host and alike on all ranks, as a `Report`
                brings it.

        Returns:
            The new state, and ``max_norm`` for `clip_`: ``ceiling`` where the norm is not finite.
        """
        if not math.isfinite(norm):
            return state, self.ceiling
        first = list(state["first"])
        if len(first) < self.warmup:
            return self._with_first(state, [*first, norm]), self.ceiling
        bound = self._bound(state, norm)
        # Statistics are of norms as if no ceiling held, or they would follow it down.
        kept = min(norm, bound)
        mean = self.decay * state["mean"] + (1.0 - self.decay) * kept
        variance = self.decay * state["variance"] + (1.0 - self.decay) * (kept - mean) ** 2
        return {**state, "mean": mean, "variance": variance}, min(bound, self.ceiling)

    def _with_first(self, state: State, first: list[float]) -> dict[str, Any]:
        if len(first) < self.warmup:
            return {**state, "first": first}
        mean = math.fsum(first) / len(first)
        variance = math.fsum((norm - mean) ** 2 for norm in first) / len(first)
        return {"first": first, "mean": mean, "variance": variance}

    def _bound(self, state: State, norm: float) -> float:
        deviation = math.sqrt(state["variance"])
        above = norm - float(state["mean"])
        if above <= self.threshold * deviation:
            return math.inf
        # Without deviation so far, what is above the mean is infinitely many of them above it.
        return float(state["mean"]) + self.threshold**2 * deviation * (deviation / above)
