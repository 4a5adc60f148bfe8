"""What losses are multiplied by in float16."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, positive


@attrs.frozen
class ScalingSettings:
    """The loss scale, which runs in other dtypes than float16 do not have.

    Args:
        loss_scale: a scale that never changes; None lets it follow the gradients.
        initial_scale: where it begins.
        scale_window: clean steps in a row after which it doubles.
        hysteresis: overflows that lower it, the last of them and each one after it, until it grows.
        hysteresis_refills: whether a clean step forgives the overflows before it.
        min_scale: falling below it ends the run.
    """

    loss_scale: float | None = leaf(
        None, "of float16, one that never changes (default: follows the gradients)", positive
    )
    initial_scale: float = leaf(2.0**16, "loss scale of the first step", positive)
    scale_window: int = leaf(2000, "clean steps after which the loss scale doubles", positive)
    hysteresis: int = leaf(1, "overflows, of which the last halves the loss scale", positive)
    hysteresis_refills: bool = leaf(False, "forgive overflows before a clean step")
    min_scale: float = leaf(1.0, "least loss scale, below which a run ends", not_negative)
