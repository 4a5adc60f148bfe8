"""The loss of a model that knows nothing yet."""

from __future__ import annotations

import math

from trainwright.stability_guards.errors import GuardError


def expected_initial_loss(vocab_size: int) -> float:
    """Return the cross-entropy of the uniform guess, ln V, in nats."""
    if vocab_size < 1:
        raise GuardError(f"vocab_size must be at least 1, got {vocab_size}")
    return math.log(vocab_size)


def check_initial_loss(loss: float, vocab_size: int, tolerance: float = 1.0) -> None:
    """Make sure that the first loss is that of a model that knows nothing.

    Args:
        loss: mean loss of the first step, before any update, in nats.
        vocab_size: number of classes.
        tolerance: how far from ln V it may be, in nats.

    Raises:
        GuardError: it is further away, or not finite.
    """
    expected = expected_initial_loss(vocab_size)
    if not abs(loss - expected) <= tolerance:
        raise GuardError(
            f"the first loss must be within {tolerance} of ln {vocab_size} = {expected:.4f}, got "
            f"{loss}; look at the initial weights, the shift of the labels and the loss's divisor"
        )
