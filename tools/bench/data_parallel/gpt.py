"""The model that every contestant trains: a small GPT of plain modules, float32, nothing tied."""

# Shapes: B batch, S sequence, H heads, D model, V vocabulary.
from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import nn


@attrs.frozen
class Shape:
    """The sizes of the model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int = 256


SHAPES = {
    "small": Shape(vocabulary=4096, width=512, layers=6, heads=8),
    "tiny": Shape(vocabulary=256, width=64, layers=2, heads=4),
}
"""small: 23.2 M parameters, 93 MB; forward and backward of 128 tokens take about 0.19 s on one core
that multiplies matrices at 105 GFLOP/s. tiny: 0.15 M."""


@attrs.frozen
class BatchShape:
    """Sequences and their length, on each rank."""

    sequences: int
    length: int


BATCHES = {"compute": BatchShape(4, 256), "comm": BatchShape(1, 128)}
"""compute: forward and backward dominate. comm: communication weighs most."""


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after this layer."""
        hidden_BSD = hidden_BSD + self._attend(self.attention_norm(hidden_BSD))
        up = F.gelu(self.up(self.feed_norm(hidden_BSD)), approximate="tanh")
        down_BSD: torch.Tensor = self.down(up)
        return hidden_BSD + down_BSD

    def _attend(self, normed_BSD: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(normed_BSD).chunk(3, dim=-1)
        q_BHSK, k_BHSK, v_BHSK = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        mixed_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, is_causal=True)
        out_BSD: torch.Tensor = self.out(mixed_BHSK.transpose(1, 2).flatten(2))
        return out_BSD


class GPT(nn.Module):
    """A decoder with learned positions and a head of its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens that follow."""
        hidden_BSD = self.tokens(tokens_BS) + self.positions[: tokens_BS.size(1)]
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD)
        logits_BSV: torch.Tensor = self.head(self.norm(hidden_BSD))
        return logits_BSV


def build_model(shape: Shape, seed: int = 0) -> GPT:
    """Return the model with the same weights wherever it is built."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = GPT(shape)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


@attrs.frozen(eq=False)
class Batch:
    """Token ids and those that follow them, [sequences, length]."""

    inputs_BS: torch.Tensor
    targets_BS: torch.Tensor

    @classmethod
    def draw(cls, shape: Shape, batch: BatchShape, seed: int) -> Batch:
        """Return random tokens, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        size = (batch.sequences, batch.length + 1)
        tokens = torch.randint(shape.vocabulary, size, generator=generator)
        return cls(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    @classmethod
    def join(cls, batches: list[Batch]) -> Batch:
        """Return one batch of the sequences of all."""
        return cls(
            torch.cat([batch.inputs_BS for batch in batches]),
            torch.cat([batch.targets_BS for batch in batches]),
        )


def mean_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of a batch."""
    logits_BSV = model(batch.inputs_BS)
    return F.cross_entropy(logits_BSV.flatten(0, 1), batch.targets_BS.flatten())
