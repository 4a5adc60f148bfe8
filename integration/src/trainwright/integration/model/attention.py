"""Grouped-query self-attention, independent of how its products are sharded."""

# Shapes: B batch, S sequence, D model, H query heads, K key/value heads, E head features.
# A shard keeps its letters: on a tensor-parallel rank H and K are this rank's part.

from __future__ import annotations

import torch
from torch import nn

from trainwright.integration.model.layers import Layers
from trainwright.integration.model.packing import Places
from trainwright.integration.model.rotary import turn
from trainwright.integration.model.shape import ModelShape


class Attention(nn.Module):
    """Causal grouped-query self-attention on a fused kernel.

    ``q_norm`` and ``k_norm`` act on each head's features before they are turned; they are
    identities where the shape has none.
    """

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.layers = layers
        self.place = turn_heads if shape.positions == "rotary" else keep_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layers.attention(shape)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if shape.qk_norm:
            self.q_norm = layers.head_norm(shape.head_width, shape.norm_epsilon)
            self.k_norm = layers.head_norm(shape.head_width, shape.norm_epsilon)

    def forward(self, hidden_BSD: torch.Tensor, places: Places) -> torch.Tensor:
        """Return the attention output [B, S, D]."""
        entered_BSD = self.layers.enter(hidden_BSD)
        q_BHSE = self.q_norm(split_heads(self.q_proj(entered_BSD), self.head_width))
        k_BKSE = self.k_norm(split_heads(self.k_proj(entered_BSD), self.head_width))
        v_BKSE = split_heads(self.v_proj(entered_BSD), self.head_width)
        mixed_BHSE = self.layers.attend(
            self.place(q_BHSE, places), self.place(k_BKSE, places), v_BKSE, places.documents
        )
        output: torch.Tensor = self.o_proj(mixed_BHSE.transpose(1, 2).flatten(2))
        return output


def turn_heads(x_BHSE: torch.Tensor, places: Places) -> torch.Tensor:
    """Return queries or keys turned by the angles of their positions."""
    return turn(x_BHSE, places.cos, places.sin)


def keep_heads(x_BHSE: torch.Tensor, places: Places) -> torch.Tensor:
    """Return the tensor itself: the residual stream says where tokens stand."""
    return x_BHSE


def split_heads(features_BSX: torch.Tensor, head_width: int) -> torch.Tensor:
    """Return [B, heads, S, E] of features that lie head after head."""
    return features_BSX.view(*features_BSX.shape[:2], -1, head_width).transpose(1, 2)
