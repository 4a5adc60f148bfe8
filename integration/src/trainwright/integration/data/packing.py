"""Whole documents in rows, with padding behind them."""

# Shapes: S sequence.

from __future__ import annotations

import numpy as np

from trainwright.integration.data.protocol import Sequence
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
    ) -> None:
        self.tokens = tokens
        self.ends = ends
        self.sequence_length = sequence_length
        self.counts = counts
        self._starts, self._stops = _rows_of(ends, sequence_length)
        if not len(self._starts) or len(tokens) < 2:
            raise DataError(f"the {what} holds no document of two tokens")

    @property
    def num_sequences(self) -> int:
        """Number of rows."""
        return len(self._starts)

    @property
    def padding_share(self) -> float:
        """Share of the places in rows that hold no token."""
        places = self.num_sequences * (self.sequence_length + 1)
        return 1.0 - float((self._stops - self._starts).sum()) / places

    def sequence(self, index: int) -> Sequence:
        """Return row ``index``."""
        start, stop = int(self._starts[index]), int(self._stops[index])
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


def _rows_of(ends: np.ndarray, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each row starts and stops in the tokens."""
    starts, stops = [], []
    total = int(ends[-1]) if len(ends) else 0
    start = 0
    while start < total:
        limit = start + sequence_length + 1
        whole = int(np.searchsorted(ends, limit, side="right"))
        fitting = int(ends[whole - 1]) if whole else 0
        starts.append(start)
        if fitting > start:
            stops.append(fitting)
            start = fitting
        else:
            stops.append(limit)
            # The next row's first token is this one's last target.
            start = limit - 1
    return np.array(starts, np.int64), np.array(stops, np.int64)
