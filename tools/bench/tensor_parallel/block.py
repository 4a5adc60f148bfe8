"""The blocks that every contestant computes: of a Llama, of plain modules, in float32."""

# Shapes: B batch, S sequence, H heads, K head, D model.

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import nn


@attrs.frozen
class Shape:
    """The sizes of the blocks and of what goes in."""

    layers: int
    width: int
    inner: int
    heads: int
    sequences: int
    length: int


SHAPES = {
    "small": Shape(layers=2, width=512, inner=1408, heads=8, sequences=2, length=256),
    "wide": Shape(layers=2, width=1024, inner=2816, heads=16, sequences=1, length=256),
    "tiny": Shape(layers=2, width=64, inner=128, heads=4, sequences=1, length=16),
}


class Attention(nn.Module):
    """Causal self-attention of as many heads as its products make."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.width // shape.heads
        self.q = nn.Linear(shape.width, shape.width, bias=False)
        self.k = nn.Linear(shape.width, shape.width, bias=False)
        self.v = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, normed_BSD: torch.Tensor) -> torch.Tensor:
        """Return what is added to the hidden states."""
        q_BHSK, k_BHSK, v_BHSK = (
            project(normed_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        out_BSD: torch.Tensor = self.out(mixed_BHSK.transpose(1, 2).flatten(2))
        return out_BSD


class Feed(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, normed_BSD: torch.Tensor) -> torch.Tensor:
        """Return what is added to the hidden states."""
        out_BSD: torch.Tensor = self.down(F.silu(self.gate(normed_BSD)) * self.up(normed_BSD))
        return out_BSD


class Block(nn.Module):
    """Both, each after a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_norm = nn.RMSNorm(shape.width)
        self.feed = Feed(shape)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this block."""
        hidden_BSD = hidden_BSD + self.attention(self.attention_norm(hidden_BSD))
        fed_BSD: torch.Tensor = self.feed(self.feed_norm(hidden_BSD))
        return hidden_BSD + fed_BSD


class Stack(nn.Module):
    """Some blocks; where sequences are cut, that is done between its ends."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.Identity()

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after all blocks."""
        hidden_BSD = self.first(hidden_BSD)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD)
        last_BSD: torch.Tensor = self.last(hidden_BSD)
        return last_BSD


def build_stack(shape: Shape) -> Stack:
    """Return the blocks with the same weights wherever they are built."""
    generator = torch.Generator().manual_seed(0)
    stack = Stack(shape)
    with torch.no_grad():
        for parameter in stack.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, shape.width**-0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return stack


def draw_inputs(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and the gradient of the output, the same everywhere."""
    generator = torch.Generator().manual_seed(1)
    size = (2, shape.sequences, shape.length, shape.width)
    hidden_BSD, upstream_BSD = torch.randn(size, generator=generator).unbind(0)
    return hidden_BSD.clone(), upstream_BSD.clone()
