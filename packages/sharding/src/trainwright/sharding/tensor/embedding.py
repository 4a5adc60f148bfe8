"""An embedding table cut by vocabulary over the tensor-parallel ranks."""

# Shapes: ... any leading dims, V vocabulary, D model; a shard keeps its letters.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.collectives import Communicator, differentiable, random
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.placement.parameters import ParameterPlacement
from trainwright.sharding.tensor.checks import check_indices
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.initial import draw_parameter_
from trainwright.sharding.tensor.local_indices import LocalIndices
from trainwright.sharding.tensor.sequence import SequenceSharding, leave_sequence


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds the rows of its part of the vocabulary.

    ``weight`` is the rows of the plain table that the cut gives this rank, zero until drawn or
    loaded. Indices are replicated, and so is the output, unless it is cut along the sequence. As in
    `torch.nn.Embedding`, an index out of range raises on the host and stops at an assertion of the
    device elsewhere.

    Args:
        num_embeddings: V of the whole table.
        embedding_dim: D.
        tp: The tensor-parallel ranks.
        cut: Which rows each rank holds; None: equal parts, rank after rank.
        padding_idx: The index whose row gets no gradient and is drawn as zeros; counts from the end
            where negative.
        sequence: Return this rank's positions only, for sequence parallelism; None: all.
        device: Of the table.
        dtype: Of the table.

    Raises:
        ShardingError: ``cut`` is None and ``tp.size`` does not divide ``num_embeddings``, the cut
            is of another size, over other ranks or no partition, or there is no ``padding_idx``.

    Communicates:
        Forward one all-reduce of the output, backward nothing; with ``sequence`` forward one
        reduce-scatter of the output, backward one all-gather of its gradient. None at size 1.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tp: Communicator,
        *,
        cut: Cut | None = None,
        padding_idx: int | None = None,
        sequence: SequenceSharding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        cut = Cut.even(num_embeddings, tp.size, "num_embeddings") if cut is None else cut
        if cut.size != num_embeddings:
            raise ShardingError(f"the cut is of {cut.size} rows, num_embeddings={num_embeddings}")
        self._rows = LocalIndices.of(cut, tp)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ShardingError(
                    f"padding_idx must be in {-num_embeddings}..{num_embeddings - 1}, "
                    f"got {padding_idx}"
                )
            padding_idx %= num_embeddings
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.tp = tp
        self.cut = cut
        self.padding_idx = padding_idx
        self.sequence = sequence
        rows = cut.numel(tp.rank)
        self.weight = nn.Parameter(torch.zeros(rows, embedding_dim, device=device, dtype=dtype))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Map integer ``[...]`` to ``[..., D]``, or with ``sequence`` to this rank's positions."""
        if indices.device.type == "cpu":
            check_indices(indices, self.num_embeddings, "embedding index")
        if self._rows.ranges == ((0, self.num_embeddings),):
            found = F.embedding(indices, self.weight, self._local_padding)
        else:
            found = self._terms(indices)
        if self.sequence is not None:
            return leave_sequence(found, self.tp, self.sequence)
        return differentiable.partial_to_replicate(found, self.tp)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        """Return where ``weight`` lies: cut along dim 0."""
        whole = (self.num_embeddings, self.embedding_dim)
        return {"weight": ParameterPlacement.cut(whole, 0, self.cut, rank=self.tp.rank)}

    def reset_parameters(self, key: random.Key, std: float) -> None:
        """Draw ``weight`` by place under ``key``, the padding row as zeros."""
        draw_parameter_(self.weight, self.parameter_placements()["weight"], key, std)
        if (row := self._local_padding) is not None:
            with torch.no_grad():
                self.weight[row].zero_()

    def extra_repr(self) -> str:
        """Say the size of the whole table and over how many ranks it is cut."""
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, {padding}"
            f"tp={self.tp.rank} of {self.tp.size}"
        )

    @property
    def _local_padding(self) -> int | None:
        return None if self.padding_idx is None else self._rows.place_of(self.padding_idx)

    def _terms(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows that are here, and zeros for those that are not."""
        if self.weight.shape[0] == 0:
            # Of the empty table, so that the gradient finds the way that it takes on other ranks.
            return self.weight.sum(0).expand(*indices.shape, self.embedding_dim)
        place, here = self._rows.find_or_refuse(indices)
        found = F.embedding(place, self.weight, self._local_padding)
        return found.masked_fill_(~here.unsqueeze(-1), 0.0)
