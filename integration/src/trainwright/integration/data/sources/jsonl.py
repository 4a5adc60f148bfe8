"""JSON lines, each a document or a conversation."""

from __future__ import annotations

import functools
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from trainwright.integration.data.sources.record import Record, record_of
from trainwright.integration.data.sources.row_files import RowFiles, named
from trainwright.integration.errors import DataError
from trainwright.integration.outside_files import parse_json

SUFFIXES = (".jsonl", ".jsonl.gz")
LONGEST_LINE = 1 << 28
"""Bytes of a line at most: a whole one is in memory, and a few zipped bytes say many."""


def json_lines(source: Path, field: str, *, chat: bool = False) -> RowFiles:
    """Return the rows of a ``.jsonl`` or ``.jsonl.gz`` file, or of all below a folder.

    Empty lines do not count.

    Args:
        source: the file or the folder.
        field: name of the field with the text, or the messages.
        chat: whether the field holds messages.

    Raises:
        DataError: there is no such file.
    """
    read = functools.partial(_rows, field=field, chat=chat)
    return RowFiles(source, named(source, SUFFIXES), read)


def _rows(path: Path, name: str, *, field: str, chat: bool) -> Iterator[Record]:
    try:
        with _opened(path) as file:
            for number, line in enumerate(_lines(file, path), 1):
                if line.strip():
                    value = _value(line, field, f"{path} line {number}")
                    yield record_of(
                        f"{name}#{number}", value, chat=chat, where=f"{path} line {number}"
                    )
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not whole, or no gzip file: {error}") from error


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise DataError(
                f"{path} line {number} has more than {LONGEST_LINE} bytes; write a document a line"
            )
        yield line


def _value(line: bytes, field: str, where: str) -> object:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} must be a JSON object, got {type(row).__name__}")
    if field not in row:
        raise DataError(
            f"{where} has no field {field!r}; it has {', '.join(map(repr, row))}: "
            "name one with --text-field"
        )
    return row[field]


def _opened(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")
