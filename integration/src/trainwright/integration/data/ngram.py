"""Byte n-gram models: what the language model has to beat."""

from __future__ import annotations

import attrs
import numpy as np

VOCABULARY = 256
SMOOTHING = 0.01
"""Added to each count, so that no byte has probability zero."""


CHUNK = 1 << 22
"""Bytes counted at once."""


@attrs.frozen(eq=False)
class NgramBaseline:
    """Probabilities of bytes after the one and the two bytes before them.

    Args:
        pairs: int64 [65536], how often byte a was followed by b, at 256·a + b.
        triples: int64 [16777216], how often a, b was followed by c, at 65536·a + 256·b + c.
    """

    pairs: np.ndarray
    triples: np.ndarray

    def bigram(self, previous: np.ndarray, following: np.ndarray) -> np.ndarray:
        """Return p(following | previous), each count raised a little so that none is zero."""
        totals = self.pairs.reshape(VOCABULARY, VOCABULARY).sum(axis=1)
        counts = self.pairs[previous * VOCABULARY + following]
        smoothed: np.ndarray = (counts + SMOOTHING) / (totals[previous] + SMOOTHING * VOCABULARY)
        return smoothed

    def trigram(
        self, before: np.ndarray, previous: np.ndarray, following: np.ndarray
    ) -> np.ndarray:
        """Return p(following | before, previous); one count of the bigram stands behind each."""
        contexts = before * VOCABULARY + previous
        counts = self.triples[contexts * VOCABULARY + following]
        # A pair at the very end of the stream is followed by nothing.
        totals = self.triples.reshape(-1, VOCABULARY)[contexts].sum(axis=-1)
        mixed: np.ndarray = (counts + self.bigram(previous, following)) / (totals + 1.0)
        return mixed

    def losses(
        self, sequences: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[float, float]:
        """Return the mean loss in nats a byte of the bigram and the trigram model.

        Args:
            sequences: uint8 [n, s+1]; each byte but a sequence's first is predicted, the second one
                by the bigram alone.
            counts: bool [n, s], which of the predicted bytes count; None: all.
        """
        bytes_ = sequences.astype(np.int64)
        by_bigram = -np.log(self.bigram(bytes_[:, :-1], bytes_[:, 1:]))
        by_trigram = -np.log(self.trigram(bytes_[:, :-2], bytes_[:, 1:-1], bytes_[:, 2:]))
        by_both = np.concatenate((by_bigram[:, :1], by_trigram), axis=1)
        if counts is None:
            return float(by_bigram.mean()), float(by_both.mean())
        return float(by_bigram[counts].mean()), float(by_both[counts].mean())


def fit_ngrams(stream: np.ndarray) -> NgramBaseline:
    """Count the bytes of a uint8 stream [n]."""
    pairs = np.zeros(VOCABULARY**2, dtype=np.int64)
    triples = np.zeros(VOCABULARY**3, dtype=np.int64)
    for start in range(0, len(stream), CHUNK):
        bytes_ = stream[start : start + CHUNK + 2].astype(np.int64)
        codes = bytes_[:-1] * VOCABULARY + bytes_[1:]
        # The last pair of a chunk is the first one of the next.
        fresh = codes if start + CHUNK + 2 > len(stream) else codes[:CHUNK]
        pairs += np.bincount(fresh, minlength=VOCABULARY**2)
        triples += np.bincount(codes[:-1] * VOCABULARY + bytes_[2:], minlength=VOCABULARY**3)
    return NgramBaseline(pairs, triples)
