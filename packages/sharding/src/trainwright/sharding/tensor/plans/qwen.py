"""The plans of Hugging Face's Qwen2 and Qwen3 models."""

from __future__ import annotations

from typing import Any

from trainwright.sharding.tensor.plans.decoder import check_model_type, decoder_plan
from trainwright.sharding.tensor.styles import HeadNorm, Style


def qwen_plan(
    config: Any,
    ranks: int,
    *,
    base: str = "model.",
    head: bool = True,
    gather_logits: bool = True,
) -> dict[str, Style | tuple[Style, ...]]:
    """Return the plan of ``Qwen2ForCausalLM`` or ``Qwen3ForCausalLM``, or of their base models.

    Qwen3 normalizes queries and keys head by head: each rank applies these norms to its own heads,
    so that their gradients are terms of a sum.

    Args:
        config: A ``Qwen2Config`` or ``Qwen3Config``; nothing else is imported or read.
        ranks: Tensor-parallel ranks. Key/value heads may be fewer.
        base: Where the decoder is in the model, with a dot at the end, or "".
        head: Whether the model has ``lm_head``.
        gather_logits: As of `llama_plan`.

    Raises:
        ShardingError: The configuration is another model's, or there are fewer query heads than
            ranks.
    """
    check_model_type(config, "qwen2", "qwen3")
    plan = decoder_plan(config, ranks, base=base, head=head, gather_logits=gather_logits)
    if config.model_type == "qwen3":
        plan[f"{base}layers.*.self_attn.q_norm"] = HeadNorm()
        plan[f"{base}layers.*.self_attn.k_norm"] = HeadNorm()
    return plan
