"""The decoder's building blocks, shared out over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import nn

from trainwright.collectives import Communicator
from trainwright.collectives.differentiable import replicate_to_partial
from trainwright.sharding.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)


class TensorParallelLayers:
    """Column, row and vocabulary-parallel layers over one communicator."""

    def __init__(self, tp: Communicator) -> None:
        self.tp = tp
        self.size = tp.size

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """Return a column-parallel product that leaves the input gradient to ``enter``."""
        return ColumnParallelLinear(in_features, out_features, self.tp, input_is_entered=True)

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """Return a row-parallel product; its output is summed over the ranks."""
        return RowParallelLinear(in_features, out_features, self.tp)

    def embedding(self, vocabulary: int, width: int) -> nn.Module:
        """Return a table whose rows are shared out over the ranks."""
        return VocabParallelEmbedding(vocabulary, width, self.tp)

    def enter(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Sum the column products' input gradients in one all-reduce, not one a product."""
        return replicate_to_partial(hidden_BSD, self.tp)

    def cross_entropy(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token [B, S] from vocabulary-sharded logits."""
        return vocab_parallel_cross_entropy(logits_BSV, labels_BS, self.tp)
