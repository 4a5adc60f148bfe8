"""Tiny random models of Hugging Face's families, saved as folders, and runs that take them up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from trainwright.checkpointing.activations import keep_all
from trainwright.collectives import SingleCommunicator
from trainwright.integration.chunks import Chunks
from trainwright.integration.model import ModelShape, PlainLayers, build_stage
from trainwright.pipeline_schedules.execute.output import as_stage_output
from trainwright.sharding import Mesh, MeshShape, placements_of
from trainwright.sharding.data import ShardPolicy, data_parallel

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _rope(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **numbers}}


LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = _rope("yarn", factor=2.0, original_max_position_embeddings=32)
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama-tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "llama-biased": (
        "LlamaConfig",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama3": ("LlamaConfig", {**SIZES, **LLAMA3}),
    "llama-linear": ("LlamaConfig", {**SIZES, **_rope("linear", factor=4.0)}),
    "llama-yarn": ("LlamaConfig", {**SIZES, **YARN}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 40}),
    "qwen2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "gpt2": ("GPT2Config", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**SIZES, **QWEN_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**SIZES, **QWEN_EXPERTS, "norm_topk_prob": True}),
    "dots1": ("Dots1Config", {**SIZES, **DEEPSEEK}),
    "deepseek": ("DeepseekV3Config", {**SIZES, **DEEPSEEK, **LATENT}),
    "deepseek-yarn": (
        "DeepseekV3Config",
        {
            **SIZES,
            **DEEPSEEK,
            **LATENT,
            "q_lora_rank": None,
            "v_head_dim": 16,
            "attention_bias": True,
            **_rope(
                "yarn",
                factor=2.0,
                original_max_position_embeddings=32,
                mscale=1.0,
                mscale_all_dim=0.7,
            ),
        },
    ),
}
"""One or more of each family, with the options that change what is computed."""


def theirs(name: str) -> Any:
    """Return a random model of transformers whose every weight matters."""
    kind, sizes = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**sizes), attn_implementation="eager"
    ).eval()
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*model.parameters(), *_biases_of_routers(model)]:
            drawn = torch.randn(parameter.shape, generator=draws)
            parameter.copy_(drawn * 0.2 if parameter.dim() > 1 else parameter + 0.1 * drawn)
    return model


def save(name: str, folder: Path, **options: Any) -> Any:
    """Save a random model to a folder and return it."""
    model = theirs(name)
    model.save_pretrained(folder, **options)
    return model


def tokens() -> torch.Tensor:
    """Return the tokens [2, 40] on which models are compared."""
    return torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


def serial(shape: ModelShape) -> Chunks:
    """Return a plain model in one process, whose weights are yet to be filled."""
    stage = build_stage(shape, PlainLayers(), range(shape.layers), keep_all()).eval()
    mesh = Mesh(SingleCommunicator(), MeshShape())
    parallel = data_parallel(stage, mesh, ShardPolicy(stage=0), placements_of(stage))
    return Chunks({0: stage}, {0: parallel})


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Return the logits of a model, theirs or a serial one of ours."""
    if not isinstance(model, Chunks):
        logits: torch.Tensor = model(tokens()).logits
        return logits
    return as_stage_output(model.stages[0](tokens_BS=tokens())).output


def _biases_of_routers(model: Any) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
