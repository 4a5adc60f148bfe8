"""Whole documents in rows, with padding behind them."""

# Shapes: S sequence.

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainwright.integration.data.protocol import Sequence
from trainwright.integration.data.row_table import row_starts, row_stop
from trainwright.integration.errors import DataError

PADDING = -1
"""The document of padding."""


class WholeDocuments:
    """Rows that begin with a document and hold as many of those that follow as fit whole.

    A document longer than a row is cut into rows of its own, the last of which the next documents
    join; each begins with the last target of the one before, so that every token is a target once,
    but for the first of each document. What is left of a row is padding.

    Args:
        tokens: integers [n], in memory or mapped from a file.
        ends: increasing integers, where each document ends.
        sequence_length: inputs a row.
        counts: bool or uint8 [n], false where a token is never a target. None: all are.
        what: name of the data in errors.
        beside: what the name of a file begins with that lists where rows begin; see `row_starts`.

    Raises:
        DataError: no document has two tokens.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        ends: np.ndarray,
        sequence_length: int,
        *,
        counts: np.ndarray | None = None,
        what: str = "data",
        beside: Path | None = None,
    ) -> None:
        self.tokens = tokens
        self.ends = ends
        self.sequence_length = sequence_length
        self.counts = counts
        self._starts = row_starts(ends, sequence_length, beside)
        if not len(self._starts) or len(tokens) < 2:
            raise DataError(f"the {what} holds no document of two tokens")

    @property
    def num_sequences(self) -> int:
        """Number of rows."""
        return len(self._starts)

    def sequence(self, index: int) -> Sequence:
        """Return row ``index``."""
        start = int(self._starts[index])
        stop = row_stop(self.ends, start, self.sequence_length)
        size = self.sequence_length + 1
        tokens = np.zeros(size, self.tokens.dtype)
        tokens[: stop - start] = self.tokens[start:stop]
        first, last = np.searchsorted(self.ends, (start, stop), side="right")
        edges = np.diff(np.concatenate(([start], self.ends[first:last], [stop])))
        documents = np.full(size, PADDING)
        documents[: stop - start] = np.repeat(np.arange(len(edges)), edges)
        counts = None
        if self.counts is not None:
            counts = np.zeros(size, bool)
            counts[: stop - start] = self.counts[start:stop]
        return Sequence(tokens, documents, counts)
