"""Where rows of whole documents begin: a table made once, which all ranks map."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK = 1 << 16
"""Rows that are in memory at once while a table is made."""


def row_starts(ends: np.ndarray, sequence_length: int, beside: Path | None = None) -> np.ndarray:
    """Return the place of the first token of each row, int64.

    Args:
        ends: increasing integers, where each document ends.
        sequence_length: inputs a row.
        beside: what the name of a file with the table begins with: it is mapped where it is there,
            and made where it can be. None makes the table in memory.
    """
    if beside is None:
        return _joined(_blocks(ends, sequence_length))
    path = beside.with_name(f"{beside.name}.rows-{sequence_length}")
    try:
        if not path.is_file():
            _write(path, _blocks(ends, sequence_length))
        return _mapped(path, ends, sequence_length)
    except (OSError, ValueError):
        # A folder that nobody may write to, or a table of something else.
        return _joined(_blocks(ends, sequence_length))


def row_stop(ends: np.ndarray, start: int, sequence_length: int) -> int:
    """Return where the row ends that begins at a place."""
    return _row(ends, start, sequence_length)[0]


def _row(ends: np.ndarray, start: int, sequence_length: int) -> tuple[int, int]:
    """Return where a row ends, and where the next one begins."""
    limit = start + sequence_length + 1
    whole = int(np.searchsorted(ends, limit, side="right"))
    fitting = int(ends[whole - 1]) if whole else 0
    if fitting > start:
        return fitting, fitting
    # The next row's first token is this one's last target.
    return limit, limit - 1


def _blocks(ends: np.ndarray, sequence_length: int) -> Iterator[bytes]:
    total = int(ends[-1]) if len(ends) else 0
    start, waiting = 0, array("q")
    while start < total:
        waiting.append(start)
        start = _row(ends, start, sequence_length)[1]
        if len(waiting) == BLOCK:
            yield waiting.tobytes()
            waiting = array("q")
    yield waiting.tobytes()


def _joined(blocks: Iterator[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(blocks), np.int64)


def _write(path: Path, blocks: Iterator[bytes]) -> None:
    # Ranks that make it at once each write a file of their own, all alike.
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("wb") as file:
            file.writelines(blocks)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _mapped(path: Path, ends: np.ndarray, sequence_length: int) -> np.ndarray:
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return np.empty(0, np.int64)
    # An empty file cannot be mapped: a ValueError, like the one below.
    starts = np.memmap(path, dtype=np.int64, mode="r")
    last = int(starts[-1])
    if starts[0] != 0 or not 0 <= last < total or _row(ends, last, sequence_length)[1] < total:
        raise ValueError(f"{path} is a table of other documents, or cut off")
    return starts
