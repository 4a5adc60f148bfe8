"""Families without experts: Llama and its kin, and GPT-2."""

from __future__ import annotations

from typing import Any

from trainwright.integration.hugging_face.keys import Keys
from trainwright.integration.hugging_face.ropes import read_rope, write_rope
from trainwright.integration.model import ModelShape
from trainwright.integration.model.shape import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Ours by the names in config.json."""

_WRITTEN = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def read_dense(keys: Keys, **parts: Any) -> ModelShape:
    """Return what Llama and its kin have in common."""
    base, scaling = read_rope(keys, parts.pop("rope_base", 10000.0))
    heads = keys.number("num_attention_heads")
    given: dict[str, Any] = {
        "vocabulary": keys.number("vocab_size"),
        "width": keys.number("hidden_size"),
        "layers": keys.number("num_hidden_layers"),
        "heads": heads,
        "kv_heads": keys.number("num_key_value_heads", parts.pop("kv_heads", None)),
        "mlp_width": keys.number("intermediate_size"),
        "norm_epsilon": keys.real("rms_norm_eps", parts.pop("norm_epsilon", 1e-6)),
        "tied": keys.flag("tie_word_embeddings", False),
        "max_positions": keys.number("max_position_embeddings"),
        "head_features": keys.optional("head_dim", parts.pop("head_dim", None)),
        "activation": _activation(keys, "hidden_act", "silu"),
    }
    if given["head_features"] is not None and given["head_features"] * heads == given["width"]:
        given["head_features"] = None  # said, but as it would be
    return ModelShape(**{**given, **parts}, rope_base=base, rope_scaling=scaling)


def write_dense(shape: ModelShape) -> dict[str, Any]:
    """Return the keys that Llama and its kin have in common."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.mlp_width,
        "rms_norm_eps": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": shape.max_positions or 2048,
        "head_dim": shape.head_width,
        "hidden_act": _WRITTEN[shape.activation],
        "rope_theta": shape.rope_base,
        "rope_parameters": write_rope(shape.rope_base, shape.rope_scaling),
    }


def read_llama(keys: Keys) -> ModelShape:
    """Return the shape of a Llama."""
    biased = keys.flag("attention_bias", False)
    return read_dense(
        keys,
        kv_heads=keys.number("num_attention_heads"),
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=keys.flag("mlp_bias", False),
    )


def write_llama(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a Llama."""
    biases = {"attention_bias": shape.qkv_bias, "mlp_bias": shape.mlp_bias}
    return {**write_dense(shape), **biases}


def read_mistral(keys: Keys) -> ModelShape:
    """Return the shape of a Mistral."""
    return read_dense(keys, window=window_of(keys, 4096))


def write_mistral(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a Mistral."""
    return {**write_dense(shape), "sliding_window": shape.window}


def read_qwen2(keys: Keys) -> ModelShape:
    """Return the shape of a Qwen2."""
    return read_dense(keys, qkv_bias=True, window=qwen_window(keys))


def read_qwen3(keys: Keys, head_dim: int | None = 128) -> ModelShape:
    """Return the shape of a Qwen3."""
    biased = keys.flag("attention_bias", False)
    return read_dense(
        keys,
        head_dim=head_dim,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        window=qwen_window(keys),
    )


def write_qwen(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a Qwen2 or Qwen3."""
    windowed = shape.window is not None
    window = {"use_sliding_window": windowed, "sliding_window": shape.window}
    if windowed:
        window["max_window_layers"] = 0  # all have it
    bias = {"attention_bias": shape.qkv_bias} if shape.qk_norm else {}
    return {**write_dense(shape), **window, **bias}


def read_gpt2(keys: Keys) -> ModelShape:
    """Return the shape of a GPT-2."""
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("reorder_and_upcast_attn", False)
    keys.only("add_cross_attention", False)
    width, heads = keys.number("n_embd"), keys.number("n_head")
    positions = keys.number("n_positions", keys.optional("n_ctx"))
    return ModelShape(
        vocabulary=keys.number("vocab_size"),
        width=width,
        layers=keys.number("n_layer"),
        heads=heads,
        kv_heads=heads,
        mlp_width=keys.number("n_inner", 4 * width),
        norm_epsilon=keys.real("layer_norm_epsilon", 1e-5),
        tied=keys.flag("tie_word_embeddings", True),
        norm="layer",
        positions="learned",
        max_positions=positions,
        activation=_activation(keys, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


def write_gpt2(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a GPT-2."""
    return {
        "vocab_size": shape.vocabulary,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.mlp_width,
        "n_positions": shape.max_positions,
        "layer_norm_epsilon": shape.norm_epsilon,
        "tie_word_embeddings": shape.tied,
        "activation_function": "gelu_new" if shape.activation == "gelu_tanh" else shape.activation,
        # There is no dropout in the training that this came from.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _activation(keys: Keys, name: str, default: str) -> Activation:
    keys.only(name, default, *ACTIVATIONS)
    return ACTIVATIONS[keys.optional(name) or default]


def window_of(keys: Keys, missing: int | None) -> int | None:
    """Return how far positions see; None: as far as there are any."""
    window: int | None = keys.optional("sliding_window", missing)
    return window


def qwen_window(keys: Keys) -> int | None:
    """Return the window of a Qwen, which no layer has unless it is said to be used."""
    used, window = keys.flag("use_sliding_window", False), late_window(keys, 28)
    return window if used else None


def late_window(keys: Keys, first: int) -> int | None:
    """Return a window that the last layers have, or those whose kind says so; None if none does.

    Args:
        keys: what is said.
        first: number of the first layer that has it, where nothing is said.
    """
    window, kinds = window_of(keys, 4096), keys.optional("layer_types")
    first = keys.number("max_window_layers", first)
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    return window if first < keys.number("num_hidden_layers") else None
