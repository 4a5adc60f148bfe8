"""What the decoder asks of its building blocks, and PyTorch's own modules as the serial answer."""

# Shapes: B batch, S sequence, D model, H query heads, K key/value heads, E head features, V
# vocabulary. A shard keeps its letters: on a tensor-parallel rank H, K and V are this rank's part.

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.model.norms import LayerNorm, RMSNorm, at_least_float32
from trainwright.integration.model.packing import Packed, attend_causally
from trainwright.integration.model.plain_experts import PlainExperts
from trainwright.integration.model.shape import ExpertShape, ModelShape


class Layers(Protocol):
    """What the decoder asks of its building blocks, which ranks may share."""

    def column(
        self, in_features: int, out_features: int, *, unit: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a product whose output features are shared out over the ranks, in whole units.

        Its input has passed through ``enter``.
        """
        ...

    def row(
        self, in_features: int, out_features: int, *, unit: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a product whose input features are shared out, in whole units; adds bias once."""
        ...

    def attention(self, shape: ModelShape) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        """Return the query, key, value and output products, with the biases that the shape says.

        The first three make whole heads from what has passed through ``enter``, as many of keys as
        of values, which divide those of queries and serve equally many neighbours each.
        """
        ...

    def whole(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """Return a product on the residual stream that every rank computes whole."""
        ...

    def attend(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        documents: Packed | None = None,
    ) -> torch.Tensor:
        """Return causal attention [B, H, S, E] over whole sequences, of which S may be a part.

        ``documents`` of the whole sequences do not see each other; None: each is one.
        """
        ...

    def norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a root-mean-square norm of the residual stream."""
        ...

    def layer_norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a layer norm of the residual stream, with a bias."""
        ...

    def head_norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a root-mean-square norm of the features of each head; ranks have other heads."""
        ...

    def embedding(self, vocabulary: int, width: int) -> nn.Module:
        """Return a table of token vectors."""
        ...

    def positions(self, number: int, width: int) -> nn.Module:
        """Return a table of vectors for positions, looked up by what ``between`` returns."""
        ...

    def enter(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Hand the residual stream to column products: sums their input gradients in backward."""
        ...

    def experts(self, width: int, experts: ExpertShape) -> nn.Module:
        """Return a mixture of experts; its input has not passed through ``enter``.

        It is called with the residual stream [B, S, D], which of it is valid [B, S] or None and, by
        name, ``positions_S``, and returns its output and a report with the 0-d sums ``balance`` and
        ``z`` over the tokens.
        """
        ...

    def between(self, positions: torch.Tensor) -> torch.Tensor:
        """Return what this rank's residual stream has between products of [..., S] positions."""
        ...

    def cross_entropy(
        self,
        logits_BSV: torch.Tensor,
        labels_BS: torch.Tensor,
        vocabulary: int,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Return the loss of each token [B, S]; zero where the label is -100.

        ``z_loss`` times the square of the log of the softmax's normaliser is part of it.
        """
        ...

    def join_vocabulary(self, logits_V: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return the logits of the whole vocabulary, given those that the head returned."""
        ...


class PlainLayers:
    """PyTorch's own modules: the serial model."""

    def column(
        self, in_features: int, out_features: int, *, unit: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return an ``nn.Linear``."""
        return nn.Linear(in_features, out_features, bias=bias)

    def row(
        self, in_features: int, out_features: int, *, unit: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return an ``nn.Linear``."""
        return nn.Linear(in_features, out_features, bias=bias)

    def attention(self, shape: ModelShape) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        """Return four of ``nn.Linear``."""
        queries = shape.heads * shape.head_width
        rows = shape.kv_heads * shape.head_width
        return (
            self.column(shape.width, queries, bias=shape.qkv_bias),
            self.column(shape.width, rows, bias=shape.qkv_bias),
            self.column(shape.width, rows, bias=shape.qkv_bias),
            self.row(queries, shape.width, bias=shape.output_bias),
        )

    def whole(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """Return an ``nn.Linear``."""
        return nn.Linear(in_features, out_features, bias=bias)

    def attend(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        documents: Packed | None = None,
    ) -> torch.Tensor:
        """Return causal attention on a fused kernel."""
        return attend_causally(q_BHSE, k_BKSE, v_BKSE, documents)

    def norm(self, width: int, epsilon: float) -> nn.Module:
        """Return an `RMSNorm`."""
        return RMSNorm(width, epsilon)

    def layer_norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a `LayerNorm`."""
        return LayerNorm(width, epsilon)

    def head_norm(self, width: int, epsilon: float) -> nn.Module:
        """Return an `RMSNorm`."""
        return RMSNorm(width, epsilon)

    def embedding(self, vocabulary: int, width: int) -> nn.Module:
        """Return an ``nn.Embedding``."""
        return nn.Embedding(vocabulary, width)

    def positions(self, number: int, width: int) -> nn.Module:
        """Return an ``nn.Embedding``."""
        return nn.Embedding(number, width)

    def enter(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return hidden_BSD

    def experts(self, width: int, experts: ExpertShape) -> nn.Module:
        """Return a `PlainExperts`."""
        return PlainExperts(width, experts)

    def between(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return positions

    def cross_entropy(
        self,
        logits_BSV: torch.Tensor,
        labels_BS: torch.Tensor,
        vocabulary: int,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Return the loss of each token [B, S], in at least float32."""
        logits = at_least_float32(logits_BSV).flatten(0, 1)
        labels = labels_BS.flatten()
        losses = F.cross_entropy(logits, labels, ignore_index=-100, reduction="none")
        if z_loss:
            counted = logits.masked_fill((labels == -100)[:, None], 0.0)
            squares = counted.logsumexp(-1).square()
            losses = losses + z_loss * torch.where(labels == -100, 0.0, squares)
        return losses.view_as(labels_BS)

    def join_vocabulary(self, logits_V: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return the tensor itself."""
        return logits_V
