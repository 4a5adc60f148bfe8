"""How the loss of a token is computed from its logits."""

from __future__ import annotations

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.checks import check_indices
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.local_indices import LocalIndices


@attrs.frozen
class HeadLoss:
    """How the cross-entropy of a head over a cut vocabulary is computed.

    With p = softmax(logits) over the true vocabulary of V words, the loss of a token is
    -(1 - s) log p[label] - s/V sum(log p) + z (log sum(exp(logits)))²,
    with s = ``label_smoothing`` and z = ``z_loss``.

    Args:
        cut: How the vocabulary, padding included, is cut over the ranks; None: into equal parts,
            rank after rank.
        vocab_size: V, where the cut vocabulary is padded: later indices count as absent. They have
            no probability, no share of the smoothing, and gradient 0.
        ignore_index: Tokens with this label have loss 0 and gradient 0, whatever their logits.
        label_smoothing: The share s of each label that is spread evenly over the vocabulary, as in
            `torch.nn.functional.cross_entropy`.
        z_loss: The factor z of the square of the log-sum-exp.
        chunk_tokens: How many tokens' logits exist at once where the loss computes them itself;
            the same on every rank. None: about a ninth of the tokens, at least 64.

    Raises:
        ShardingError: A number is out of range.

    Source:
        Szegedy et al., Rethinking the Inception Architecture (2016), section 7; Chowdhery et al.,
        PaLM (2022), section 5.
    """

    cut: Cut | None = None
    vocab_size: int | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ShardingError(f"label_smoothing must be in 0..1, got {self.label_smoothing}")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ShardingError(f"z_loss must be finite and at least 0, got {self.z_loss}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ShardingError(f"vocab_size must be at least 1, got {self.vocab_size}")
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ShardingError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")

    def indices(self, held: int, tp: Communicator) -> LocalIndices:
        """Return which words of the vocabulary this rank holds.

        Args:
            held: How many columns of logits there are here.
            tp: The ranks that the vocabulary is cut over.

        Raises:
            ShardingError: The cut, ``vocab_size`` or ``held`` do not fit together.
        """
        cut = self.cut
        if cut is None:
            return LocalIndices.of(Cut.even(held * tp.size, tp.size), tp, self.vocab_size)
        indices = LocalIndices.of(cut, tp, self.vocab_size)
        if held != cut.numel(tp.rank):
            raise ShardingError(
                f"rank {tp.rank} has {held} of the vocabulary, but its cut gives it "
                f"{cut.numel(tp.rank)} of {cut.size}"
            )
        return indices

    def check_labels(self, labels: torch.Tensor, vocab_size: int) -> None:
        """Raise unless the labels are of the vocabulary, where reading them stalls nothing."""
        if labels.device.type == "cpu":
            check_indices(labels, vocab_size, "label", ignore_index=self.ignore_index)
