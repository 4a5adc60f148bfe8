"""Text files in memory as one stream of byte tokens, a share of the files held out."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import attrs
import numpy as np

from trainwright.integration.data.choice import HELD_OUT_SHARE
from trainwright.integration.data.dataset import Dataset
from trainwright.integration.data.protocol import Samples
from trainwright.integration.data.reader import Rows
from trainwright.integration.data.sources.record import Document
from trainwright.integration.data.sources.text import TextFiles
from trainwright.integration.data.tokenizer import ByteTokenizer
from trainwright.integration.data.tokens import Tokens

SEPARATOR = b"\0"
"""Stands after each file: text holds no zero byte, so the model learns where files end."""


@attrs.frozen(eq=False)
class Corpus:
    """Training and held-out bytes, where they are few; a run maps them from files instead.

    Args:
        train: uint8 [n], training files one after another, each followed by a zero byte.
        held_out: uint8 [k], the files (or, of a single file, the last bytes) kept for evaluation.
        files: number of text files read.
        skipped: names of files in the folder that are not text, and were left out.
        source: the file or folder that was read.
    """

    train: np.ndarray
    held_out: np.ndarray
    files: int
    skipped: tuple[str, ...]
    source: str

    @property
    def checksum(self) -> str:
        """SHA-256 of what is trained on and of what is held out, as hexadecimal digits."""
        digest = hashlib.sha256(len(self.train).to_bytes(8, "little"))
        digest.update(self.train.data)
        digest.update(self.held_out.data)
        return digest.hexdigest()

    @property
    def tokenizer(self) -> ByteTokenizer:
        """Bytes."""
        return ByteTokenizer()

    @property
    def byte_stream(self) -> np.ndarray:
        """The training bytes."""
        return self.train

    def describe(self) -> str:
        """Return how much there is, in one line."""
        return self.with_documents("stream").describe()

    def samples(self, sequence_length: int, seed: int) -> Samples:
        """Return the samples of a run.

        Raises:
            DataError: there is less than one.
        """
        return self.with_documents("stream").samples(sequence_length, seed)

    def held_out_rows(self, sequence_length: int, count: int) -> Rows:
        """Return up to ``count`` held-out sequences, spread over what is held out.

        Raises:
            DataError: there is none.
        """
        return self.with_documents("stream").held_out_rows(sequence_length, count)

    def with_documents(self, packing: str) -> Dataset:
        """Return this data with its documents packed in another way, see `Tokens.rows`."""
        ends = [np.flatnonzero(part == 0) + 1 for part in (self.train, self.held_out)]
        return Dataset(
            train=(Tokens(self.train, ends[0], 0),),
            held_out=(Tokens(self.held_out, ends[1], 0, what="held-out part"),),
            weights=(Fraction(1),),
            tokenizer=ByteTokenizer(),
            packing=packing,
            checksum=self.checksum,
            source=self.source,
            files=self.files,
            skipped=self.skipped,
        )


def read_corpus(source: Path, pattern: str = "*", held_out_share: float = HELD_OUT_SHARE) -> Corpus:
    """Read a text file, or every text file below a folder in order of its relative name.

    Which files are held out depends on their relative names alone; at least one file is, and at
    least one is not. Of a single file the last bytes are held out.

    Args:
        source: a file, or a folder; hidden folders, ``__pycache__`` and ``site-packages`` in it
            are passed over.
        pattern: shell pattern of the file names that count in a folder.
        held_out_share: share of the files (or bytes) held out, between 0 and 1.

    Raises:
        DataError: the path is missing, empty or holds no text.
    """
    files = TextFiles(source, pattern)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for held_out, record in files.split(held_out_share):
        assert isinstance(record, Document)
        parts[held_out].extend([*record.pieces, SEPARATOR])
    train, held = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    only = files.paths[0] if files.files == 1 else source
    return Corpus(train, held, files=files.files, skipped=files.skipped, source=str(only))
