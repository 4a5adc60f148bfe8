"""Byte n-gram models: what the language model has to beat."""

from __future__ import annotations

import attrs
import numpy as np

VOCABULARY = 256
SMOOTHING = 0.01
"""Added to each count, so that no byte has probability zero."""


@attrs.frozen(eq=False)
class NgramBaseline:
    """Log-probabilities of bytes after the one and the two bytes before them.

    Args:
        bigram: float32 [256, 256], log p(byte | previous byte).
        trigram: float32 [65536, 256], log p(byte | two previous bytes), interpolated with the
            bigram where a context was not seen.
    """

    bigram: np.ndarray
    trigram: np.ndarray

    def losses(self, sequences: np.ndarray) -> tuple[float, float]:
        """Return the mean loss in nats a byte of the bigram and the trigram model.

        Args:
            sequences: uint8 [n, s+1]; each byte but a sequence's first is predicted, the second one
                by the bigram alone.
        """
        previous = sequences[:, :-1].astype(np.int64)
        following = sequences[:, 1:].astype(np.int64)
        by_bigram = -self.bigram[previous, following]
        contexts = previous[:, :-1] * VOCABULARY + previous[:, 1:]
        by_trigram = -self.trigram[contexts, following[:, 1:]]
        total = by_bigram[:, 0].sum(dtype=np.float64) + by_trigram.sum(dtype=np.float64)
        return float(by_bigram.mean(dtype=np.float64)), float(total / following.size)


def fit_ngrams(stream: np.ndarray) -> NgramBaseline:
    """Count the bytes of a uint8 stream [n] and return the smoothed models."""
    bytes_ = stream.astype(np.int64)
    pairs = np.bincount(bytes_[:-1] * VOCABULARY + bytes_[1:], minlength=VOCABULARY**2)
    counts = pairs.reshape(VOCABULARY, VOCABULARY) + SMOOTHING
    bigram = counts / counts.sum(axis=1, keepdims=True)
    triples = np.bincount(
        (bytes_[:-2] * VOCABULARY + bytes_[1:-1]) * VOCABULARY + bytes_[2:],
        minlength=VOCABULARY**3,
    ).reshape(VOCABULARY**2, VOCABULARY)
    # One pseudo-count of the bigram's distribution stands behind each context.
    prior = np.tile(bigram, (VOCABULARY, 1))
    trigram = (triples + prior) / (triples.sum(axis=1, keepdims=True) + 1.0)
    return NgramBaseline(
        bigram=np.log(bigram).astype(np.float32), trigram=np.log(trigram).astype(np.float32)
    )
