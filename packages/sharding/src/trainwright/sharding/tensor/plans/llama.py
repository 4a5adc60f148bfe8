"""The plan of Hugging Face's Llama models."""

from __future__ import annotations

from typing import Any

from trainwright.sharding.tensor.plans.decoder import check_model_type, decoder_plan
from trainwright.sharding.tensor.styles import Style


def llama_plan(
    config: Any,
    ranks: int,
    *,
    base: str = "model.",
    head: bool = True,
    gather_logits: bool = True,
) -> dict[str, Style | tuple[Style, ...]]:
    """Return the plan of ``LlamaForCausalLM``, or with ``base=""`` of ``LlamaModel``.

    Args:
        config: A ``LlamaConfig``; nothing else is imported or read.
        ranks: Tensor-parallel ranks. Key/value heads may be fewer.
        base: Where the decoder is in the model, with a dot at the end, or "".
        head: Whether the model has ``lm_head``; the base model has none.
        gather_logits: Whether logits are whole on every rank, as the model's own loss needs them;
            otherwise they are this rank's part of the vocabulary, for
            `vocab_parallel_cross_entropy`. The base model's hidden states, with ``lm_head.weight``,
            go into `linear_cross_entropy_sum` with ``input_is_entered=True``.

    Raises:
        ShardingError: The configuration is another model's, or there are fewer query heads than
            ranks.
    """
    check_model_type(config, "llama")
    return decoder_plan(config, ranks, base=base, head=head, gather_logits=gather_logits)
