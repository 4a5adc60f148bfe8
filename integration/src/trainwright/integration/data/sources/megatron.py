"""Indexed token files of Megatron-LM: ``NAME.bin`` with tokens, ``NAME.idx`` with their places."""

from __future__ import annotations

import struct
from pathlib import Path

import attrs
import numpy as np

from trainwright.integration.errors import DataError

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
"""Kinds of elements by their code; tokens are whole numbers."""


@attrs.frozen(eq=False)
class IndexedTokens:
    """What the two files hold.

    Args:
        tokens: integers [n], mapped.
        ends: int64, the place after the last token of each document.
    """

    tokens: np.ndarray
    ends: np.ndarray


def prefix_of(path: Path) -> Path:
    """Return what is before ``.bin`` and ``.idx``."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def map_indexed(path: Path) -> IndexedTokens:
    """Map the tokens that a pair of files holds, all of whose numbers are checked.

    Args:
        path: one of the two files, or what is before ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is missing, no such file, truncated, or says what is not so.
    """
    prefix = prefix_of(path)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        content, size = _mapped(index), data.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read the indexed tokens {prefix}: {error}") from error
    if len(content) < HEADER.size:
        raise DataError(f"{index} has {len(content)} bytes, fewer than its header of {HEADER.size}")
    magic, version, code, sequences, entries = HEADER.unpack(bytes(content[: HEADER.size]))
    if magic != MAGIC or version != VERSION:
        raise DataError(
            f"{index} is no index of version {VERSION}: it begins with {magic!r}, version {version}"
        )
    if DTYPES.get(code, "f")[0] == "f":
        raise DataError(f"{index} says that tokens are of kind {code}, which are no whole numbers")
    # After the three lists a fourth, a byte a sequence, is allowed.
    needed = HEADER.size + 12 * sequences + 8 * entries
    if len(content) not in (needed, needed + sequences):
        raise DataError(
            f"{index} has {len(content)} bytes, where {sequences} sequences and {entries} "
            f"boundaries of documents take {needed}; it is truncated, or its header is wrong"
        )
    lengths, pointers, documents = _lists(content, sequences, entries)
    dtype = np.dtype("<" + DTYPES[code])
    places = _places(index, lengths, pointers, dtype.itemsize)
    _check_documents(index, documents, sequences)
    if places[-1] * dtype.itemsize != size:
        raise DataError(
            f"{data} has {size} bytes, where {index.name} says {int(places[-1])} tokens of "
            f"{dtype.itemsize} bytes; one of them is truncated, or of other data"
        )
    if not size:
        raise DataError(f"{data} holds no token")
    return IndexedTokens(np.memmap(data, dtype=dtype, mode="r"), places[documents[1:]])


def _mapped(path: Path) -> np.ndarray:
    if not path.stat().st_size:
        return np.empty(0, np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _lists(
    content: np.ndarray, sequences: int, entries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    found, start = [], HEADER.size
    for count, dtype in ((sequences, "<i4"), (sequences, "<i8"), (entries, "<i8")):
        stop = start + count * np.dtype(dtype).itemsize
        # A copy: the header's 34 bytes leave the lists unaligned.
        found.append(np.frombuffer(content[start:stop].tobytes(), dtype).astype(np.int64))
        start = stop
    return found[0], found[1], found[2]


def _places(index: Path, lengths: np.ndarray, pointers: np.ndarray, width: int) -> np.ndarray:
    """Return where each sequence starts, and where the last one ends, in tokens."""
    if (lengths < 0).any():
        raise DataError(f"{index} lists a sequence of {int(lengths.min())} tokens")
    places = np.concatenate(([0], np.cumsum(lengths)))
    wrong = np.flatnonzero(pointers != places[:-1] * width)
    if len(wrong):
        number = int(wrong[0])
        raise DataError(
            f"{index} puts sequence {number} at byte {int(pointers[number])}, where the ones "
            f"before it end at {int(places[number]) * width}; sequences must follow each other"
        )
    return places


def _check_documents(index: Path, documents: np.ndarray, sequences: int) -> None:
    # Sequences that belong to no document would be left out in silence.
    if (
        not len(documents)
        or documents[0] != 0
        or documents[-1] != sequences
        or (np.diff(documents) < 0).any()
    ):
        raise DataError(
            f"{index} must list boundaries of documents that rise from 0 to its {sequences} "
            f"sequences, got {documents[:3].tolist()} … {documents[-3:].tolist()}"
        )
