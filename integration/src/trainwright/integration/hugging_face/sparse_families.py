"""Families with experts: Mixtral, Qwen's and those of DeepSeek's kind."""

from __future__ import annotations

from typing import Any

import attrs

from trainwright.integration.hugging_face.dense_families import (
    late_window,
    qwen_window,
    read_dense,
    read_qwen3,
    window_of,
    write_dense,
    write_qwen,
)
from trainwright.integration.hugging_face.keys import Keys
from trainwright.integration.model import ExpertShape, LatentShape, ModelShape
from trainwright.integration.model.rotary import YarnScaling, yarn_magnitude
from trainwright.sharding.expert import Routing


def read_mixtral(keys: Keys) -> ModelShape:
    """Return the shape of a Mixtral."""
    keys.only("router_jitter_noise", 0.0)
    routing = Routing(keys.number("num_local_experts"), keys.number("num_experts_per_tok", 2))
    dense = read_dense(keys, window=window_of(keys, None), rope_base=1e6, norm_epsilon=1e-5)
    return attrs.evolve(dense, experts=ExpertShape(routing, dense.mlp_width))


def write_mixtral(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a Mixtral."""
    assert shape.experts is not None
    return {
        **write_dense(shape),
        "intermediate_size": shape.experts.width,
        "num_local_experts": shape.experts.routing.num_experts,
        "num_experts_per_tok": shape.experts.routing.top_k,
        "sliding_window": shape.window,
    }


def read_qwen2_moe(keys: Keys) -> ModelShape:
    """Return the shape of a Qwen2 with experts."""
    keys.only("qkv_bias", True)
    shared = keys.number("shared_expert_intermediate_size")
    dense = read_dense(keys, qkv_bias=True, window=qwen_window(keys))
    return _with_qwen_experts(keys, dense, shared)


def read_qwen3_moe(keys: Keys) -> ModelShape:
    """Return the shape of a Qwen3 with experts."""
    return _with_qwen_experts(keys, read_qwen3(keys, head_dim=None), None)


def _with_qwen_experts(keys: Keys, dense: ModelShape, shared: int | None) -> ModelShape:
    number = keys.optional("num_local_experts")
    routing = Routing(
        keys.number("num_experts", number),
        keys.number("num_experts_per_tok"),
        normalize=keys.flag("norm_topk_prob", False),
    )
    experts = ExpertShape(
        routing, keys.number("moe_intermediate_size"), shared, shared_gate=shared is not None
    )
    every = keys.number("decoder_sparse_step", 1)
    alone = set(keys.optional("mlp_only_layers") or ())
    dense_layers = [i for i in range(dense.layers) if i in alone or (i + 1) % every]
    return attrs.evolve(dense, experts=experts, dense_layers=dense_layers)


def write_qwen_moe(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a Qwen2 or Qwen3 with experts."""
    assert shape.experts is not None
    routing = shape.experts.routing
    shared = shape.experts.shared_width
    return {
        **write_qwen(shape),
        "num_experts": routing.num_experts,
        "num_experts_per_tok": routing.top_k,
        "norm_topk_prob": routing.normalize,
        "moe_intermediate_size": shape.experts.width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(shape.dense_layers),
        **({} if shared is None else {"shared_expert_intermediate_size": shared}),
    }


def read_dots1(keys: Keys) -> ModelShape:
    """Return the shape of a dots.llm1: DeepSeek-V3's experts, Qwen3's attention."""
    biased = keys.flag("attention_bias", False)
    dense = read_dense(
        keys, qkv_bias=biased, output_bias=biased, qk_norm=True, window=late_window(keys, 62)
    )
    return with_deepseek_experts(keys, dense, normalize=False)


def with_deepseek_experts(keys: Keys, dense: ModelShape, *, normalize: bool) -> ModelShape:
    """Return a shape with experts as DeepSeek-V3 has them.

    Args:
        keys: what is said.
        dense: the rest of the shape.
        normalize: of the weights of experts, where nothing is said.
    """
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("moe_layer_freq", 1)
    routing = Routing(
        keys.number("n_routed_experts"),
        keys.number("num_experts_per_tok"),
        score="sigmoid",
        normalize=keys.flag("norm_topk_prob", normalize),
        scale=keys.real("routed_scaling_factor"),
        groups=keys.number("n_group"),
        top_groups=keys.number("topk_group"),
        biased=True,
    )
    width, shared = keys.number("moe_intermediate_size"), keys.number("n_shared_experts")
    experts = ExpertShape(routing, width, shared * width or None)
    first = range(min(keys.number("first_k_dense_replace"), dense.layers))
    if len(first) == dense.layers:
        return dense
    return attrs.evolve(dense, experts=experts, dense_layers=first)


def write_deepseek_experts(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of experts as DeepSeek-V3 has them."""
    assert shape.experts is not None
    routing, shared = shape.experts.routing, shape.experts.shared_width or 0
    return {
        "n_routed_experts": routing.num_experts,
        "num_experts_per_tok": routing.top_k,
        "norm_topk_prob": routing.normalize,
        "routed_scaling_factor": routing.scale,
        "n_group": routing.groups,
        "topk_group": routing.top_groups,
        "moe_intermediate_size": shape.experts.width,
        "n_shared_experts": shared // shape.experts.width,
        "first_k_dense_replace": len(shape.dense_layers),
    }


def write_dots1(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a dots.llm1."""
    window: dict[str, Any] = {
        "sliding_window": None,
        "layer_types": ["full_attention"] * shape.layers,
    }
    if shape.window is not None:
        window = {
            "sliding_window": shape.window,
            "layer_types": ["sliding_attention"] * shape.layers,
        }
    bias = {"attention_bias": shape.qkv_bias}
    return {**write_dense(shape), **write_deepseek_experts(shape), **window, **bias}


def read_deepseek_v3(keys: Keys) -> ModelShape:
    """Return the shape of a DeepSeek-V3: latent attention and many experts."""
    biased = keys.flag("attention_bias", False)
    turned, plain = keys.number("qk_rope_head_dim"), keys.number("qk_nope_head_dim")
    keys.only("qk_head_dim", plain + turned)
    keys.only("head_dim", turned)
    rope = {**keys.mapping("rope_scaling"), **keys.mapping("rope_parameters")}
    latent = LatentShape(
        keys=keys.number("kv_lora_rank"),
        plain=plain,
        turned=turned,
        values=keys.number("v_head_dim"),
        queries=keys.optional("q_lora_rank", 1536),
        interleaved=keys.flag("rope_interleave", True),
        score_weight=float(rope.get("mscale_all_dim") or 0.0),
    )
    dense = read_dense(
        keys,
        head_features=turned,
        qkv_bias=biased,
        output_bias=biased,
        latent=latent,
    )
    return with_deepseek_experts(keys, _sharpened(dense, latent), normalize=True)


def write_deepseek_v3(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a DeepSeek-V3."""
    latent = shape.latent
    if latent is None or shape.experts is None:
        return {}  # which is read as another one
    written = {**write_dense(shape), **write_deepseek_experts(shape)}
    if latent.score_weight:
        written["rope_parameters"]["mscale_all_dim"] = latent.score_weight
    return {
        **written,
        "kv_lora_rank": latent.keys,
        "q_lora_rank": latent.queries,
        "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.turned,
        "v_head_dim": latent.values,
        "head_dim": latent.turned,
        "rope_interleave": latent.interleaved,
        "attention_bias": shape.qkv_bias,
    }


def _sharpened(dense: ModelShape, latent: LatentShape) -> ModelShape:
    """Return a shape whose scores are as sharp as its stretched positions want them."""
    if isinstance(dense.rope_scaling, YarnScaling) and latent.score_weight:
        factor = yarn_magnitude(dense.rope_scaling.factor, latent.score_weight) ** 2
        latent = attrs.evolve(latent, score_factor=factor)
    return attrs.evolve(dense, latent=latent)
