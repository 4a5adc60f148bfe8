"""How good the model is, on the way and at the end."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, positive


@attrs.frozen
class EvaluationSettings:
    """What is evaluated, and what is generated.

    Args:
        evaluate_every: steps from one evaluation to the next, which changes nothing of the run; 0
            evaluates at the end only.
        evaluate_sequences: held-out sequences that are evaluated.
        sample_bytes: tokens generated at the end: bytes, where tokens are bytes.
    """

    evaluate_every: int = leaf(
        0, "steps between evaluations of the held-out loss, 0 for the end only", not_negative
    )
    evaluate_sequences: int = leaf(512, "held-out sequences to evaluate", positive)
    sample_bytes: int = leaf(
        200, "tokens (bytes, without a tokenizer) to generate at the end", not_negative
    )
