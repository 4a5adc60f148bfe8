"""Memory as Megatron-Bridge's estimator counts it: even shares, norms cut like everything else."""

from __future__ import annotations

import attrs

from trainwright.sharding.memory.shape import TransformerShape
from trainwright.sharding.mesh import MeshShape

_WHOLE_BYTES = 6
_CUT_BYTES = 12


@attrs.frozen
class BridgeEstimate:
    """The most loaded rank, in 16 bits with a distributed optimizer.

    Norms are divided by tp and stages, of which ours keep whole ones; there is no router; selective
    recomputation and sequence parallelism are taken for granted, and full recomputation is priced
    as none: it is not a model of what our ranks allocate.

    Args:
        shape: The model's.
        layout: The ranks.
        sequence: Tokens of a sequence.
        batch: Sequences of a microbatch.
        microbatches: In a step.
        chunks: Stages of the pipeline that each rank holds; 1: not interleaved.

    Source: NVIDIA-NeMo/Megatron-Bridge, training/utils/theoretical_memory_utils.py.
    """

    shape: TransformerShape
    layout: MeshShape
    sequence: int
    batch: int
    microbatches: int = 1
    chunks: int = 1

    @property
    def dense_parameters(self) -> int:
        """Weights of all layers but routed experts', with the embedding."""
        return self._blocks + 2 * self.shape.width + self._table * (1 if self.shape.tied else 2)

    @property
    def routed_parameters(self) -> int:
        """Weights of experts."""
        experts = self.shape.experts
        if experts is None:
            return 0
        matrices = 3 if self.shape.gated else 2
        each = matrices * self.shape.width * experts.width * experts.number
        return each * sum(map(self.shape.is_sparse, range(self.shape.layers)))

    @property
    def dense_parameters_per_rank(self) -> float:
        """Of these, on the most loaded rank: with the embedding, and the head where it is alone."""
        tables = self._table / self.layout.tp
        if self.layout.pp == 1 and not self.shape.tied:
            tables *= 2
        blocks = self._blocks + 2 * self.shape.width
        return blocks / self.layout.tp / self.layout.pp + tables

    @property
    def routed_parameters_per_rank(self) -> float:
        """Weights of experts on a rank."""
        return self.routed_parameters / (self.layout.ep * self.layout.etp * self.layout.pp)

    @property
    def dense_bytes_per_parameter(self) -> float:
        """Bytes of one, states cut over data and context ranks."""
        return _WHOLE_BYTES + _CUT_BYTES / (self.layout.dp * self.layout.cp)

    @property
    def routed_bytes_per_parameter(self) -> float:
        """Bytes of one of experts, states cut over the copies of an expert."""
        return _WHOLE_BYTES + _CUT_BYTES / self.layout.edp

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and states of a rank."""
        dense = self.dense_parameters_per_rank * self.dense_bytes_per_parameter
        return dense + self.routed_parameters_per_rank * self.routed_bytes_per_parameter

    @property
    def activation_bytes(self) -> float:
        """Activations of the first rank."""
        shape, pp = self.shape, self.layout.pp
        tokens = self.sequence * self.batch
        stream = tokens * shape.width
        held = shape.layers * stream * (18 + 4 * shape.mlp_width / shape.width)
        held += 8 * tokens * pp + stream * pp
        if self.chunks > 1:
            held *= 1 + (pp - 1) / (pp * self.chunks)
        else:
            held *= min(1.0, self.microbatches / pp)
        if pp == 1:
            held += stream * 4 * (1 + shape.vocabulary / shape.width)
        return held / (self.layout.tp * self.layout.cp)

    @property
    def _table(self) -> int:
        return self.shape.vocabulary * self.shape.width

    @property
    def _blocks(self) -> int:
        shape = self.shape
        queries = shape.heads * shape.head_width
        attention = 2 * shape.width * (queries + shape.kv_heads * shape.head_width)
        matrices = 3 if shape.gated else 2
        dense = sum(not shape.is_sparse(layer) for layer in range(shape.layers))
        return (
            shape.layers * (attention + 4 * shape.width)
            + dense * matrices * shape.width * shape.mlp_width
        )
