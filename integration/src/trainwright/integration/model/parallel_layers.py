"""The decoder's building blocks, shared out over tensor-parallel ranks."""

# Shapes: B batch, S sequence, D model, V vocabulary; a shard keeps its letters.

from __future__ import annotations

import torch
from torch import nn

from trainwright.collectives.differentiable import replicate_to_partial
from trainwright.integration.model.norms import LayerNorm, RMSNorm
from trainwright.integration.model.packing import Packed, attend_causally
from trainwright.integration.model.shape import ExpertShape, ModelShape
from trainwright.integration.sequence_part import Attend
from trainwright.sharding import Mesh
from trainwright.sharding.expert import MixtureOfExperts
from trainwright.sharding.tensor import (
    ColumnParallelLinear,
    Cut,
    HeadLayout,
    KeyValueLinear,
    RowParallelLinear,
    SequenceSharding,
    VocabParallelEmbedding,
    enter_sequence,
    join_parts,
    place_partial_,
    vocab_parallel_cross_entropy,
)


class TensorParallelLayers:
    """Column, row and vocabulary-parallel layers over the tensor-parallel ranks of a mesh.

    Sizes that the ranks do not divide are shared out as evenly as they can be.

    Args:
        mesh: all ranks; experts lie on its expert view.
        sequence: how positions are cut between the products; None where every rank has all.
        attend: causal attention where sequences are cut over other ranks as well.
    """

    def __init__(
        self,
        mesh: Mesh,
        sequence: SequenceSharding | None = None,
        attend: Attend = attend_causally,
    ) -> None:
        self.mesh = mesh
        self.tp = mesh.communicator("tp")
        self.sequence = sequence
        self._attend = attend

    def column(
        self, in_features: int, out_features: int, *, unit: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a column-parallel product that leaves the input gradient to ``enter``."""
        cut = Cut.balanced(out_features // unit, self.tp.size).scaled(unit)
        return self._column(in_features, out_features, cut, bias)

    def row(
        self, in_features: int, out_features: int, *, unit: int = 1, bias: bool = False
    ) -> nn.Module:
        """Return a row-parallel product; its output is summed over the ranks."""
        cut = Cut.balanced(in_features // unit, self.tp.size).scaled(unit)
        return self._row(in_features, out_features, cut, bias)

    def attention(self, shape: ModelShape) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        """Return the products of attention, shared out by heads.

        Key/value heads that cannot be are whole on every rank, which computes those it needs.
        """
        heads = HeadLayout(shape.heads, shape.kv_heads, shape.head_width, self.tp.size)
        queries = shape.heads * shape.head_width
        return (
            self._column(shape.width, queries, heads.query_cut(), shape.qkv_bias),
            self._key_value(shape, heads),
            self._key_value(shape, heads),
            self._row(queries, shape.width, heads.query_cut(), shape.output_bias),
        )

    def whole(self, in_features: int, out_features: int, *, bias: bool = False) -> nn.Module:
        """Return a product that is whole on every rank; ranks may see a part of its gradient."""
        return self._on_stream(nn.Linear(in_features, out_features, bias=bias))

    def attend(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        documents: Packed | None = None,
    ) -> torch.Tensor:
        """Return causal attention of this rank's heads."""
        return self._attend(q_BHSE, k_BKSE, v_BKSE, documents)

    def norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a norm; under sequence parallelism each rank sees a part of its gradient."""
        return self._on_stream(RMSNorm(width, epsilon))

    def layer_norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a norm with a bias; with a part of both gradients as ``norm`` has it."""
        return self._on_stream(LayerNorm(width, epsilon))

    def head_norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a norm of which each rank, having other heads, sees a part of the gradient."""
        return place_partial_(RMSNorm(width, epsilon))

    def experts(self, width: int, experts: ExpertShape) -> nn.Module:
        """Return a mixture whose experts lie on the expert view of the mesh."""
        return MixtureOfExperts(
            width,
            experts.width,
            experts.routing,
            self.mesh,
            shared_width=experts.shared_width,
            shared_gate=experts.shared_gate,
            sequence=self.sequence,
        )

    def embedding(self, vocabulary: int, width: int) -> nn.Module:
        """Return a table whose rows are shared out over the ranks."""
        cut = Cut.balanced(vocabulary, self.tp.size)
        return VocabParallelEmbedding(vocabulary, width, self.tp, cut=cut, sequence=self.sequence)

    def positions(self, number: int, width: int) -> nn.Module:
        """Return a table that is whole on every rank; it is small beside the vocabulary's.

        Under sequence parallelism each rank sees a part of its gradient.
        """
        return self._on_stream(nn.Embedding(number, width))

    def enter(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Make all positions, and sum the column products' input gradients in one collective."""
        if self.sequence is None:
            return replicate_to_partial(hidden_BSD, self.tp)
        return enter_sequence(hidden_BSD, self.tp, self.sequence)

    def between(self, positions: torch.Tensor) -> torch.Tensor:
        """Return all, or under sequence parallelism this rank's share of them."""
        if self.sequence is None:
            return positions
        return Cut.uneven(positions.shape[-1], self.tp.size).take(positions, -1, self.tp.rank)

    def cross_entropy(
        self,
        logits_BSV: torch.Tensor,
        labels_BS: torch.Tensor,
        vocabulary: int,
        z_loss: float = 0.0,
    ) -> torch.Tensor:
        """Return the loss of each token [B, S] from vocabulary-sharded logits."""
        cut = Cut.balanced(vocabulary, self.tp.size)
        return vocab_parallel_cross_entropy(logits_BSV, labels_BS, self.tp, cut=cut, z_loss=z_loss)

    def join_vocabulary(self, logits_V: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return all logits [V] of the whole vocabulary on every rank."""
        return join_parts(logits_V, self.tp, Cut.balanced(vocabulary, self.tp.size), 0)

    def _on_stream(self, norm: nn.Module) -> nn.Module:
        """Return what acts on the residual stream, of which a rank may have some positions."""
        return norm if self.sequence is None else place_partial_(norm)

    def _column(self, in_features: int, out_features: int, cut: Cut, bias: bool) -> nn.Module:
        return ColumnParallelLinear(
            in_features,
            out_features,
            self.tp,
            cut=cut,
            bias=bias,
            input_is_entered=True,
            sequence=self.sequence,
        )

    def _row(self, in_features: int, out_features: int, cut: Cut, bias: bool) -> nn.Module:
        return RowParallelLinear(
            in_features, out_features, self.tp, cut=cut, bias=bias, sequence=self.sequence
        )

    def _key_value(self, shape: ModelShape, heads: HeadLayout) -> nn.Module:
        rows = shape.kv_heads * shape.head_width
        if not heads.kv_is_replicated:
            return self._column(shape.width, rows, heads.kv_cut(), shape.qkv_bias)
        repeats = heads.repeats(self.tp.rank)
        return KeyValueLinear(
            shape.width,
            rows,
            self.tp,
            cut=heads.kv_used_cut(),
            # The attention kernel itself repeats heads that serve equally many.
            repeats=None if len(set(repeats)) == 1 else repeats,
            bias=shape.qkv_bias,
            input_is_entered=True,
            sequence=self.sequence,
        )
