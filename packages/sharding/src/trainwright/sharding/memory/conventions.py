"""Memory as others count it: formulas of papers and tools, each under its own name and source.

They are here to be compared with. What this package's own code allocates is `memory`.
"""

from __future__ import annotations

import attrs

from trainwright.sharding.errors import ShardingError

GIB = 2**30


def zero_bytes(
    parameters: float, ranks: int, stage: int, *, gradients: float = 2, states: float = 12
) -> float:
    """Return the model states of a rank: 16 bytes a parameter on one device.

    Args:
        parameters: Of the model.
        ranks: Data-parallel ranks.
        stage: 0 cuts nothing, 1 states, 2 also gradients, 3 also the 2 bytes of a weight.
        gradients: Bytes of one.
        states: Bytes of 32-bit weights and moments.

    Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), table 1; GB are 1e9 bytes there, and the
    larger columns are cut off, not rounded.
    """
    _check_stage(stage)
    cut = [states, gradients, 2.0][:stage]
    whole = [states, gradients, 2.0][stage:]
    return parameters * (sum(whole) + sum(cut) / ranks)


def zero_largest_model(device_bytes: float, ranks: int, stage: int, *, tp: int = 1) -> float:
    """Return the parameters whose states fill devices of a size.

    Source: the same, table 2, left half.
    """
    return tp * device_bytes / zero_bytes(1.0, ranks, stage)


def megatron_bytes(weights: int, gradients: int, ranks: int = 1) -> float:
    """Return bytes a parameter; more than one rank says that the optimizer is distributed.

    With 16-bit weights and gradients Megatron holds 32-bit copies of both, with 32-bit gradients of
    the weights only.

    Args:
        weights: Bytes of one.
        gradients: Bytes of one.
        ranks: Ranks over which what the optimizer holds is cut.

    Source: Megatron-LM, docs/user-guide/features/dist_optimizer.md.
    """
    copies = (4 if weights < 4 else 0) + (4 if gradients < 4 else 0)
    return weights + gradients + (copies + 8) / ranks


def deepspeed_zero2_bytes(parameters: float, ranks: int, *, offload: bool = False) -> float:
    """Return a rank's model states as DeepSpeed's estimator of stage 2 counts them.

    16-bit weights and gradients whole, and 16 bytes cut: more than the paper's 2 + 14/N, since
    32-bit gradients stand beside. With the optimizer offloaded the 16-bit weights alone.

    Source: DeepSpeed, docs/code-docs/source/memory.rst; what it prints as GB are GiB.
    """
    return 2.0 * parameters if offload else parameters * (4.0 + 16.0 / ranks)


def deepspeed_zero3_bytes(
    parameters: float,
    largest_layer: float,
    ranks: int,
    *,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> float:
    """Return a rank's model states as DeepSpeed's estimator of stage 3 counts them.

    Weights and gradients of the largest layer are whole in 16 bits; of everything else 18 bytes a
    parameter are cut.

    Source: as `deepspeed_zero2_bytes`.
    """
    if offload_parameters and not offload_optimizer:
        raise ShardingError("DeepSpeed offloads parameters only where it offloads the optimizer")
    cut = 18.0
    if offload_optimizer:
        cut = 0.0 if offload_parameters else 2.0
    return 4.0 * largest_layer + cut * parameters / ranks


def gpt_parameters(width: int, layers: int, vocabulary: int = 0, positions: int = 0) -> int:
    """Return the weights of a GPT with MLPs of 4h: ``l(12h² + 13h) + vh + sh + 2h``.

    Without a vocabulary and positions those of the blocks alone.

    Source: BigScience, chronicles-prequel.md; Narayanan et al. (arXiv:2104.04473), equation 2.
    """
    blocks = layers * (12 * width**2 + 13 * width)
    if not vocabulary:
        return blocks
    return blocks + (vocabulary + positions + 2) * width


@attrs.frozen
class GptActivations:
    """Activations of a GPT in 16 bits, with dropout masks of a byte and MLPs of 4h.

    Args:
        sequence: Tokens of a sequence, s.
        batch: Sequences of a microbatch, b.
        width: Features of the stream, h.
        heads: Of attention, a.
        layers: L.
        tp: Tensor ranks, t.
        pp: Pipeline ranks, p.
        chunks: Stages of the pipeline that each of its ranks holds, interleaved.
        sequence_parallel: Whether positions are cut over tensor ranks between products.
        recompute: ``none``, ``selective`` (attention's s² part) or ``full``.

    Source: Korthikanti et al., Reducing Activation Recomputation (arXiv:2205.05198), table 2 and
    sections 4.2 and 4.3; sizes in its figures are GiB.
    """

    sequence: int
    batch: int
    width: int
    heads: int
    layers: int
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"

    def __attrs_post_init__(self) -> None:
        if self.recompute not in ("none", "selective", "full"):
            raise ShardingError(
                f"recompute must be none, selective or full, got {self.recompute!r}"
            )

    @property
    def layer_bytes(self) -> float:
        """Bytes of one layer of one microbatch."""
        stream = float(self.sequence * self.batch * self.width)
        if self.recompute == "full":
            return 2.0 * stream
        scores = 0.0
        if self.recompute == "none":
            scores = 5.0 * self.heads * self.sequence / (self.width * self.tp)
        beside = 10.0 / self.tp if self.sequence_parallel else 10.0
        return stream * (beside + 24.0 / self.tp + scores)

    @property
    def in_flight_factor(self) -> float:
        """What a first rank of an interleaved pipeline holds, over that of 1F1B."""
        return 1.0 + (self.pp - 1) / (self.pp * self.chunks) if self.chunks > 1 else 1.0

    @property
    def first_stage_bytes(self) -> float:
        """Bytes on the first rank of a pipeline that is kept busy: all L layers' worth."""
        return self.layers * self.layer_bytes * self.in_flight_factor

    def embedding_bytes(self) -> float:
        """Return the dropout masks of the embedding of p microbatches."""
        return self.sequence * self.batch * self.width * self.pp / self.tp

    def output_bytes(self, vocabulary: int) -> float:
        """Return the final norm, the head's input and the 32-bit logits, without a pipeline."""
        stream = self.sequence * self.batch * self.width
        return 4.0 * stream / self.tp * (1.0 + vocabulary / self.width)

    def output_tensors_bytes(self) -> float:
        """Return the outputs that a first stage need not keep once they are sent: p of them."""
        return 2.0 * self.sequence * self.batch * self.width * self.pp


def _check_stage(stage: int) -> None:
    if stage not in (0, 1, 2, 3):
        raise ShardingError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
