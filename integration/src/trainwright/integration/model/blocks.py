"""The decoder's blocks, independent of how their products are sharded."""

# Shapes: B batch, S sequence, D model.

from __future__ import annotations

import torch
from torch import nn

from trainwright.integration.model.attention import Attention
from trainwright.integration.model.feed_forward import feed_forward
from trainwright.integration.model.latent_attention import LatentAttention
from trainwright.integration.model.layers import Layers, PlainLayers
from trainwright.integration.model.norms import RMSNorm, at_least_float32
from trainwright.integration.model.packing import Packed, Places, attend_causally
from trainwright.integration.model.rotary import rotary_angles
from trainwright.integration.model.shape import ExpertShape, ModelShape

__all__ = [
    "Attention",
    "Block",
    "DenseBlock",
    "ExpertBlock",
    "LatentAttention",
    "Layers",
    "Packed",
    "Places",
    "PlainLayers",
    "RMSNorm",
    "at_least_float32",
    "attend_causally",
    "attention",
    "build_block",
    "rotary_angles",
    "stream_norm",
]

Stream = tuple[torch.Tensor, torch.Tensor]
"""The residual stream [B, S, D] and the sum of auxiliary losses of the blocks before, 0-d."""


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(shape, layers)
        self.self_attn = attention(shape, layers)
        self.post_attention_layernorm = stream_norm(shape, layers)
        self.mlp = feed_forward(shape, layers)

    def forward(self, hidden_BSD: torch.Tensor, places: Places) -> torch.Tensor:
        """Return the residual stream [B, S, D] after this block."""
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), places)
        output: torch.Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return output


class DenseBlock(nn.Module):
    """A block without experts between blocks that have some: it adds no auxiliary losses."""

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.input_layernorm = stream_norm(shape, layers)
        self.self_attn = attention(shape, layers)
        self.post_attention_layernorm = stream_norm(shape, layers)
        self.mlp = feed_forward(shape, layers)

    def forward(self, stream: Stream, places: Places) -> Stream:
        """Return the residual stream after this block and the losses as they came."""
        hidden_BSD, losses = stream
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), places)
        return hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD)), losses


class ExpertBlock(nn.Module):
    """One pre-norm decoder block whose feed-forward part is a mixture of experts."""

    def __init__(self, shape: ModelShape, experts: ExpertShape, layers: Layers) -> None:
        super().__init__()
        self.sizes = experts
        self.input_layernorm = stream_norm(shape, layers)
        self.self_attn = attention(shape, layers)
        self.post_attention_layernorm = stream_norm(shape, layers)
        self.mlp = layers.experts(shape.width, experts)

    def forward(self, stream: Stream, places: Places) -> Stream:
        """Return the residual stream [B, S, D] and the auxiliary losses after this block."""
        hidden_BSD, losses = stream
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), places)
        normed_BSD = self.post_attention_layernorm(hidden_BSD)
        output_BSD, report = self.mlp(normed_BSD, places.valid_BS, positions_S=places.between_S)
        losses = losses + self.sizes.balance * report.balance + self.sizes.z * report.z
        return hidden_BSD + output_BSD, losses


def build_block(shape: ModelShape, layers: Layers, number: int) -> nn.Module:
    """Return the block of a number: one that hands on the stream, or the stream and losses."""
    if shape.experts is None:
        return Block(shape, layers)
    if number in shape.dense_layers:
        return DenseBlock(shape, layers)
    return ExpertBlock(shape, shape.experts, layers)


def attention(shape: ModelShape, layers: Layers) -> nn.Module:
    """Return the attention that a shape says."""
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent, layers)
    return Attention(shape, layers)


def stream_norm(shape: ModelShape, layers: Layers) -> nn.Module:
    """Return the norm of the residual stream that a shape says."""
    if shape.norm == "layer":
        return layers.layer_norm(shape.width, shape.norm_epsilon)
    return layers.norm(shape.width, shape.norm_epsilon)
