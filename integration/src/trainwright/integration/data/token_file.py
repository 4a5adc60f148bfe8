"""Files of tokens that all ranks map: safetensors, written piece by piece, aside and renamed."""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from trainwright.integration.data.tokens import Tokens
from trainwright.integration.errors import DataError
from trainwright.integration.outside_files import parse_json

HEADER_BYTES = 1024
"""Room for the header, whose numbers are known at the end; a multiple of every element's size."""

KINDS = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I64": "<i8", "BOOL": "?"}
CODES = {"uint8": "U8", "uint16": "U16", "uint32": "U32", "int64": "I64", "bool": "BOOL"}


class TokenWriter:
    """Writes documents as they come; none of them is kept.

    Args:
        file: where tokens go, open for writing and reading.
        counts: where it goes which of them count; None where all do.
        dtype: of the tokens.
    """

    def __init__(self, file: IO[bytes], counts: IO[bytes] | None, dtype: np.dtype[Any]) -> None:
        self._file = file
        self._counts = counts
        self._dtype = dtype
        self._ends = array("q")
        self._length = 0
        file.write(b"\0" * HEADER_BYTES)

    def __len__(self) -> int:
        return self._length

    def add(self, tokens: np.ndarray, *, counts: bool = True) -> None:
        """Write tokens, all of which count or none."""
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        if self._counts is not None:
            self._counts.write((b"\1" if counts else b"\0") * len(tokens))
        self._length += len(tokens)

    def end_document(self) -> None:
        """Say that a document ends here."""
        self._ends.append(self._length)

    def finish(self) -> None:
        """Write what is known only now, and make it last."""
        entries: dict[str, Any] = {"__metadata__": {"format": "trainwright-tokens-1"}}
        at = self._entry(entries, "tokens", self._dtype.name, self._length, 0)
        # Numbers of eight bytes begin at multiples of eight.
        gap = -at % 8
        self._file.write(b"\0" * gap)
        at = self._entry(entries, "gap", "uint8", gap, at)
        self._file.write(np.frombuffer(self._ends, np.int64).astype("<i8").tobytes())
        at = self._entry(entries, "ends", "int64", len(self._ends), at)
        if self._counts is not None:
            self._counts.seek(0)
            while block := self._counts.read(1 << 24):
                self._file.write(block)
            self._entry(entries, "counts", "bool", self._length, at)
        header = json.dumps(entries).encode().ljust(HEADER_BYTES - 8)
        self._file.seek(0)
        self._file.write(struct.pack("<Q", len(header)) + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _entry(self, entries: dict[str, Any], name: str, dtype: str, size: int, at: int) -> int:
        end = at + size * np.dtype(dtype).itemsize
        entries[name] = {"dtype": CODES[dtype], "shape": [size], "data_offsets": [at, end]}
        return end


@contextmanager
def written_tokens(path: Path, dtype: np.dtype[Any], *, counts: bool) -> Iterator[TokenWriter]:
    """Write a file of tokens beside its place; it takes its place where no error is raised.

    Args:
        path: the file.
        dtype: of the tokens.
        counts: whether some tokens do not count.
    """
    aside, besides = path.with_suffix(".tmp"), path.with_suffix(".counts.tmp")
    try:
        with ExitStack() as opened:
            file = opened.enter_context(aside.open("w+b"))
            extra = opened.enter_context(besides.open("w+b")) if counts else None
            writer = TokenWriter(file, extra, dtype)
            yield writer
            writer.finish()
        aside.replace(path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)
        besides.unlink(missing_ok=True)


def token_path(place: Path, part: str) -> Path:
    """Return the token file of a part of a source."""
    return place.with_name(f"{place.name}.{part}.safetensors")


def map_token_file(path: Path, what: str, end_token: int | None = None) -> Tokens:
    """Map a file that `written_tokens` has written.

    Args:
        path: the file.
        what: name of the tokens in errors.
        end_token: the token behind each document.

    Raises:
        DataError: the file is missing, truncated, or another.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            entries = parse_json(file.read(min(length, HEADER_BYTES)))
    except (OSError, ValueError, struct.error) as error:
        raise DataError(f"cannot read the token file {path}: {error}") from error
    if not isinstance(entries, dict):
        raise DataError(f"{path} is no token file: its header is no JSON object")
    found = {}
    for name in ("tokens", "ends", "counts"):
        if name in entries:
            found[name] = _mapped(path, entries[name], 8 + length, size)
    if not {"tokens", "ends"} <= found.keys():
        raise DataError(f"{path} is no token file: it holds {sorted(entries)!r:.200}")
    _check_lists(path, found)
    return Tokens(
        found["tokens"], found["ends"], end_token=end_token, counts=found.get("counts"), what=what
    )


def _mapped(path: Path, entry: dict[str, Any], start: int, size: int) -> np.ndarray:
    try:
        begin, end = entry["data_offsets"]
        (length,) = entry["shape"]
        dtype = np.dtype(KINDS[entry["dtype"]])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no token file: {error}") from error
    if not all(type(number) is int for number in (begin, end, length)):
        raise DataError(f"{path} is no token file: {entry} has places that are no whole numbers")
    if not 0 <= begin <= end <= size - start or end - begin != length * dtype.itemsize:
        raise DataError(f"the token file {path} is truncated, or its header is wrong")
    if not length:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=start + begin, shape=(length,))


def _check_lists(path: Path, found: dict[str, np.ndarray]) -> None:
    tokens, ends, counts = (found.get(name) for name in ("tokens", "ends", "counts"))
    assert tokens is not None
    assert ends is not None
    if tokens.dtype.kind != "u" or ends.dtype != np.int64:
        raise DataError(f"{path} is no token file: {tokens.dtype} tokens and {ends.dtype} ends")
    # The whole list is for who reads it; its ends tell another file's.
    if (int(ends[-1]) if len(ends) else 0) != len(tokens):
        raise DataError(f"the token file {path} is damaged: its documents end elsewhere")
    if counts is not None and (counts.dtype.kind not in "bu" or len(counts) != len(tokens)):
        raise DataError(f"the token file {path} is damaged: not every token counts or does not")


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
