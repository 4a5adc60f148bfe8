"""A stream of tokens cut into rows: contiguous, with or without the boundaries of documents."""

# Shapes: S sequence.

from __future__ import annotations

import numpy as np

from trainwright.integration.data.packing import PADDING
from trainwright.integration.data.protocol import Sequence
from trainwright.integration.errors import DataError


class Stream:
    """A token stream cut into rows that follow each other; a row's last target begins the next.

    Args:
        tokens: integers [n], in memory or mapped from a file.
        sequence_length: inputs a row.
        ends: increasing integers, where each document ends (the place after its last token).
        end_token: the last token of each document, where ``ends`` are not known. Without either,
            rows are read as one document each.
        counts: bool or uint8 [n], false where a token is never a target. None: all are.
        what: name of the stream in errors.
        tail: whether the last tokens make a row that is filled up, where they fill none.

    Raises:
        DataError: the stream is shorter than one row.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        sequence_length: int,
        *,
        ends: np.ndarray | None = None,
        end_token: int | None = None,
        counts: np.ndarray | None = None,
        what: str = "data",
        tail: bool = False,
    ) -> None:
        self.num_sequences = (len(tokens) - 1) // sequence_length
        if self.num_sequences < 1:
            unit = "byte" if tokens.dtype == np.uint8 else "token"
            raise DataError(
                f"the {what} holds {len(tokens)} {unit}s, shorter than one sequence of "
                f"sequence_length={sequence_length} and its next {unit}; "
                f"a sequence length up to {max(len(tokens) - 1, 1)} works"
            )
        if tail and (len(tokens) - 1) % sequence_length:
            self.num_sequences += 1
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.ends = ends
        self.end_token = end_token
        self.counts = counts

    def sequence(self, index: int) -> Sequence:
        """Return row ``index``."""
        start = index * self.sequence_length
        stop = start + self.sequence_length + 1
        if stop > len(self.tokens):
            return self._filled(start, stop - len(self.tokens))
        counts = None if self.counts is None else self.counts[start:stop].astype(bool)
        return Sequence(self.tokens[start:stop], self._documents(start, stop), counts)

    def _filled(self, start: int, missing: int) -> Sequence:
        """Return the last row, in which so many places hold no token and count nothing."""
        stop = len(self.tokens)
        documents = self._documents(start, stop)
        if documents is not None:
            documents = np.concatenate((documents, np.full(missing, PADDING)))
        counts = np.zeros(stop - start + missing, bool)
        counts[: stop - start] = True if self.counts is None else self.counts[start:stop]
        filling = np.zeros(missing, self.tokens.dtype)
        return Sequence(np.concatenate((self.tokens[start:stop], filling)), documents, counts)

    def _documents(self, start: int, stop: int) -> np.ndarray | None:
        if self.end_token is not None:
            ended = self.tokens[start : stop - 1] == self.end_token
            return np.concatenate(([0], np.cumsum(ended)))
        if self.ends is None:
            return None
        first, last = np.searchsorted(self.ends, (start, stop), side="right")
        edges = np.diff(np.concatenate(([start], self.ends[first:last], [stop])))
        return np.repeat(np.arange(len(edges)), edges)
