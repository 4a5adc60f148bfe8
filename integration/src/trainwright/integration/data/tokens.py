"""Tokens in one array, in memory or mapped from a file, and how rows are made of them."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np

from trainwright.integration.data.packing import WholeDocuments
from trainwright.integration.data.protocol import Sequences
from trainwright.integration.data.stream import Stream
from trainwright.integration.errors import ConfigError, DataError

PACKINGS = ("stream", "documents", "whole")
BLOCK = 1 << 24
"""Tokens looked at in one go."""


@attrs.frozen(eq=False)
class Tokens:
    """Documents, one after another.

    Args:
        tokens: integers [n].
        ends: increasing int64, the place after the last token of each document; None where nothing
            but ``end_token`` tells.
        end_token: the token behind each document; None where there is none.
        counts: bool or uint8 [n], false where a token is never a target; None where all are.
        what: name of them in errors.
        beside: what the names of files begin with that are made of them; None: none is made.
    """

    tokens: np.ndarray
    ends: np.ndarray | None = None
    end_token: int | None = None
    counts: np.ndarray | None = None
    what: str = "data"
    beside: Path | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(
        self, sequence_length: int, packing: str = "stream", *, tail: bool = False
    ) -> Sequences:
        """Return sequences of these tokens.

        Args:
            sequence_length: inputs a row.
            packing: ``stream`` cuts rows that follow each other and is blind to documents;
                ``documents`` cuts the same rows, in which documents do not see each other;
                ``whole`` begins rows with documents, cuts only those longer than a row, and fills
                rows up with padding.
            tail: whether the last tokens make a row that is filled up, where they fill none.

        Raises:
            DataError: there are fewer tokens than a row has.
            ConfigError: nothing tells where documents end.
        """
        if packing == "stream":
            return Stream(
                self.tokens, sequence_length, counts=self.counts, what=self.what, tail=tail
            )
        if packing == "documents":
            if self.ends is None and self.end_token is None:
                raise ConfigError(
                    f"--packing documents: nothing tells where documents of the {self.what} end; "
                    "give a tokenizer with an end token, or --packing stream"
                )
            return Stream(
                self.tokens,
                sequence_length,
                ends=self.ends,
                end_token=self.end_token if self.ends is None else None,
                counts=self.counts,
                what=self.what,
                tail=tail,
            )
        if self.ends is None:
            raise ConfigError(
                f"--packing whole needs the ends of documents, which the {self.what} does not "
                "list; --packing documents finds them by their end token"
            )
        return WholeDocuments(
            self.tokens,
            self.ends,
            sequence_length,
            counts=self.counts,
            what=self.what,
            beside=self.beside,
        )

    def check_vocabulary(self, vocabulary: int) -> None:
        """Look through all tokens.

        Raises:
            DataError: one is not below ``vocabulary``, or negative.
        """
        for start in range(0, len(self.tokens), BLOCK):
            block = self.tokens[start : start + BLOCK]
            least, greatest = int(block.min()), int(block.max())
            if least < 0 or greatest >= vocabulary:
                wrong = least if least < 0 else greatest
                place = start + int(np.flatnonzero(block == wrong)[0])
                raise DataError(
                    f"the {self.what} holds token {wrong} at place {place}, outside of the "
                    f"tokenizer's vocabulary of {vocabulary}; give the --tokenizer it was made "
                    f"with, or --tokenizer ids:N with N of at least {greatest + 1}"
                )
