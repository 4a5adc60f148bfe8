"""The dense feed-forward blocks."""

# Shapes: B batch, S sequence, D model, F hidden features; a shard keeps its letters.

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.model.layers import Layers
from trainwright.integration.model.shape import ModelShape

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""The functions that ``ModelShape.activation`` names."""


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``.

    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        self.activate = ACTIVATIONS[shape.activation]
        self.gate_proj = layers.column(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.up_proj = layers.column(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.down_proj = layers.row(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, D]."""
        entered_BSD = self.layers.enter(hidden_BSD)
        gated_BSF = self.activate(self.gate_proj(entered_BSD)) * self.up_proj(entered_BSD)
        output: torch.Tensor = self.down_proj(gated_BSF)
        return output


class PlainMLP(nn.Module):
    """``down(activation(up(x)))``."""

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        self.activate = ACTIVATIONS[shape.activation]
        self.up_proj = layers.column(shape.width, shape.mlp_width, bias=shape.mlp_bias)
        self.down_proj = layers.row(shape.mlp_width, shape.width, bias=shape.mlp_bias)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, D]."""
        hidden_BSF = self.activate(self.up_proj(self.layers.enter(hidden_BSD)))
        output: torch.Tensor = self.down_proj(hidden_BSF)
        return output


def feed_forward(shape: ModelShape, layers: Layers) -> nn.Module:
    """Return the dense block that a shape says."""
    return GatedMLP(shape, layers) if shape.gated else PlainMLP(shape, layers)
