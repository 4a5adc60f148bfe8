"""How good the model is at the end."""

from __future__ import annotations

import attrs

from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, positive


@attrs.frozen
class EvaluationSettings:
    """What is evaluated, and what is generated.

    Args:
        evaluate_sequences: held-out sequences that are evaluated.
        sample_bytes: bytes of text generated at the end.
    """

    evaluate_sequences: int = leaf(512, "held-out sequences to evaluate", positive)
    sample_bytes: int = leaf(200, "bytes of text to generate at the end", not_negative)
