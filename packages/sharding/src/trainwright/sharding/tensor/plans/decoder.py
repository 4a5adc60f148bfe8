"""What the plans of decoders have in common."""

from __future__ import annotations

from typing import Any

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.heads import HeadLayout
from trainwright.sharding.tensor.styles import (
    Column,
    Enter,
    JoinSequence,
    KeyValue,
    NoDropout,
    Norm,
    Row,
    SequenceLength,
    SetAttribute,
    SplitSequence,
    Style,
    Vocab,
)


def decoder_plan(
    config: Any, ranks: int, *, base: str, head: bool, gather_logits: bool
) -> dict[str, Style | tuple[Style, ...]]:
    """Return the plan of a decoder with the names that Llama gave its modules.

    Args:
        config: Read are ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``,
            ``hidden_size``, ``intermediate_size`` and ``vocab_size``.
        ranks: Tensor-parallel ranks.
        base: Where the decoder is in the model, with a dot at the end, or "".
        head: Whether the model has ``lm_head``.
        gather_logits: Whether the head's logits are whole on every rank.

    Raises:
        ShardingError: There are fewer query heads than ranks.
    """
    heads = heads_of(config, ranks)
    features = Cut.uneven(config.intermediate_size, ranks)
    vocabulary = Cut.uneven(config.vocab_size, ranks)
    key_value = KeyValue(heads)
    layer = f"{base}layers.*"
    plan: dict[str, Style | tuple[Style, ...]] = {
        f"{base}embed_tokens": Vocab(vocabulary),
        f"{base}layers.0": SplitSequence("hidden_states"),
        f"{layer}.input_layernorm": Norm(),
        f"{layer}.self_attn": (
            NoDropout("attention_dropout"),
            SequenceLength("position_ids"),
            Enter("hidden_states"),
            SetAttribute("num_key_value_groups", key_value.groups()),
        ),
        f"{layer}.self_attn.q_proj": Column(heads.query_cut()),
        f"{layer}.self_attn.k_proj": key_value,
        f"{layer}.self_attn.v_proj": key_value,
        f"{layer}.self_attn.o_proj": Row(heads.query_cut()),
        f"{layer}.post_attention_layernorm": Norm(),
        f"{layer}.mlp": Enter(0),
        f"{layer}.mlp.gate_proj": Column(features),
        f"{layer}.mlp.up_proj": Column(features),
        f"{layer}.mlp.down_proj": Row(features),
        f"{base}norm": (Norm(), JoinSequence(partial_gradient=head)),
    }
    if head:
        plan["lm_head"] = Column(vocabulary, gather_output=gather_logits, entered=True)
    return plan


def heads_of(config: Any, ranks: int) -> HeadLayout:
    """Return how a configuration's heads are shared out."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return HeadLayout(num_heads, num_kv_heads, head_dim, ranks)


def check_model_type(config: Any, *expected: str) -> None:
    """Raise unless a configuration is of one of the types that a plan is made for.

    Raises:
        ShardingError: It is of another type.
    """
    found = getattr(config, "model_type", None)
    if found not in expected:
        raise ShardingError(
            f"this plan is for configurations with model_type {' or '.join(map(repr, expected))}, "
            f"got {found!r}"
        )
