"""An embedding table cut by vocabulary over the tensor-parallel ranks."""

# Shapes: ... any leading dims, V vocabulary, D model; a shard keeps its letters.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, differentiable, random
from trainwright.sharding.divisions import check_divides
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.tensor.checks import check_indices
from trainwright.sharding.tensor.initial import draw_parameter_


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its part of the vocabulary.

    ``weight`` is rows rank * V/tp .. (rank + 1) * V/tp of the plain table, zero until drawn or
    loaded. Indices and output are replicated. As in `torch.nn.Embedding`, an index out of range
    raises on the host and stops at an assertion of the device elsewhere.

    Args:
        num_embeddings: V of the whole table; a multiple of ``tp.size``.
        embedding_dim: D.
        tp: The tensor-parallel ranks.
        device: Of the table.
        dtype: Of the table.

    Raises:
        ShardingError: ``tp.size`` does not divide ``num_embeddings``.

    Communicates:
        Forward one all-reduce of the output; backward nothing. None at size 1.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tp: Communicator,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_divides(num_embeddings, tp.size, "num_embeddings", "tp")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.tp = tp
        local = num_embeddings // tp.size
        self.weight = nn.Parameter(torch.zeros(local, embedding_dim, device=device, dtype=dtype))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Map integer ``[...]`` to ``[..., D]``."""
        if indices.device.type == "cpu":
            check_indices(indices, self.num_embeddings, "embedding index")
        if self.tp.size == 1:
            return F.embedding(indices, self.weight)
        rows = self.weight.shape[0]
        local = indices - self.tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        # An index of no rank stays out of range, so that the lookup itself refuses it.
        known = (indices >= 0) & (indices < self.num_embeddings)
        rows_here = torch.where(known, local.masked_fill(elsewhere, 0), -1)
        found = F.embedding(rows_here, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return differentiable.partial_to_replicate(found, self.tp)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies: cut along dim 0."""
        whole = (self.num_embeddings, self.embedding_dim)
        placement = ParameterPlacement.sharded(whole, 0, rank=self.tp.rank, size=self.tp.size)
        return {"weight": placement}

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key``."""
        draw_parameter_(self.weight, self.parameter_placements()["weight"], key, std)

    def extra_repr(self) -> str:
        """Say the size of the whole table and over how many ranks it is cut."""
        return f"{self.num_embeddings}, {self.embedding_dim}, tp={self.tp.rank} of {self.tp.size}"
