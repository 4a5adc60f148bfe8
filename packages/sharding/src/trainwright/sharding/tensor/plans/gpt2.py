"""The plan of Hugging Face's GPT-2 models."""

from __future__ import annotations

from typing import Any

from trainwright.sharding.errors import NotAvailableError
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.plans.decoder import check_model_type, heads_of
from trainwright.sharding.tensor.styles import (
    Column,
    Dropout,
    Enter,
    JoinSequence,
    NoDropout,
    Norm,
    Row,
    SequenceLength,
    SetAttribute,
    SplitSequence,
    Style,
    Vocab,
    Whole,
)


def gpt2_plan(
    config: Any,
    ranks: int,
    *,
    base: str = "transformer.",
    head: bool = True,
    gather_logits: bool = True,
    dropout_seed: int | None = None,
) -> dict[str, Style | tuple[Style, ...]]:
    """Return the plan of ``GPT2LMHeadModel``, or with ``base=""`` of ``GPT2Model``.

    The fused ``c_attn`` keeps [Q; K; V] of each rank's heads.

    Args:
        config: A ``GPT2Config``; nothing else is imported or read.
        ranks: Tensor-parallel ranks.
        base: Where the decoder is in the model, with a dot at the end, or "".
        head: Whether the model has ``lm_head``.
        gather_logits: As of `llama_plan`.
        dropout_seed: Seed of the masks behind embeddings, attention and MLP, where the
            configuration drops values; None where it does not, or to be refused in training.

    Raises:
        ShardingError: The configuration is another model's, or there are fewer heads than ranks.
        NotAvailableError: The model has cross-attention.
    """
    check_model_type(config, "gpt2")
    if config.add_cross_attention:
        raise NotAvailableError(
            "GPT-2 with add_cross_attention=True has no plan yet; use add_cross_attention=False"
        )
    heads = heads_of(config, ranks)
    features = Cut.uneven(config.n_inner or 4 * config.hidden_size, ranks)
    vocabulary = Cut.uneven(config.vocab_size, ranks)
    local = tuple(heads.num_local(rank) for rank in range(ranks))
    block = f"{base}h.*"
    plan: dict[str, Style | tuple[Style, ...]] = {
        f"{base}wte": Vocab(vocabulary),
        f"{base}wpe": Whole(),
        f"{base}h.0": SplitSequence("hidden_states"),
        f"{block}.ln_1": Norm(),
        f"{block}.attn": (
            NoDropout("attn_dropout"),
            SequenceLength("position_ids"),
            SetAttribute("num_heads", local),
            SetAttribute("split_size", tuple(count * heads.head_dim for count in local)),
        ),
        f"{block}.attn.c_attn": (Enter(), Column(heads.fused_by_block())),
        f"{block}.attn.c_proj": Row(heads.query_cut()),
        f"{block}.ln_2": Norm(),
        f"{block}.mlp.c_fc": (Enter(), Column(features)),
        f"{block}.mlp.c_proj": Row(features),
        f"{base}ln_f": (Norm(), JoinSequence(partial_gradient=head)),
    }
    if head:
        plan["lm_head"] = Column(vocabulary, gather_output=gather_logits, entered=True)
    if dropout_seed is not None:
        plan[f"{base}drop"] = Dropout(dropout_seed, in_sequence=False)
        plan[f"{block}.attn.resid_dropout"] = Dropout(dropout_seed)
        plan[f"{block}.mlp.dropout"] = Dropout(dropout_seed)
    return plan
