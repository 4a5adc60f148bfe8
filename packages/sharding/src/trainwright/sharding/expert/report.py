"""What a layer of experts tells about one forward."""

from __future__ import annotations

import attrs
import torch


@attrs.frozen(eq=False)
class RoutingReport:
    """Auxiliary losses as sums over tokens, and counts.

    Multiply a loss by its coefficient, add it to the summed loss of the tokens, and divide all by
    the valid tokens of the global batch once: that makes it right in every layout. The losses are
    alike on all tp ranks, and terms of a sum over dp and cp, as the loss of the tokens is.

    Args:
        balance: The balance loss, see `balance_terms`: per valid token 1 where experts are evenly
            used. Hugging Face's for Mixtral and Qwen is K times it, per micro-batch.
        z: The sum over valid tokens of the squared log-sum-exp of the router's logits.
        counts: int64 [E], the choices of this rank's valid tokens, before any is dropped. The sum
            over the ranks of a pipeline stage counts each choice once.
        dropped: int64 [E], those of them that found their expert full.
    """

    balance: torch.Tensor
    z: torch.Tensor
    counts: torch.Tensor
    dropped: torch.Tensor
