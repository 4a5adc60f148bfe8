"""JSON lines, each a document or a conversation."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from trainwright.integration.data.sources import files
from trainwright.integration.data.sources.holding_out import split_rows
from trainwright.integration.data.sources.record import Record, record_of
from trainwright.integration.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz")


class JsonLines:
    """A ``.jsonl`` or ``.jsonl.gz`` file, or all of them below a folder; empty lines do not count.

    Args:
        source: the file or the folder.
        field: name of the field with the text, or the messages.
        chat: whether the field holds messages.

    Raises:
        DataError: there is no such file.
    """

    skipped: tuple[str, ...] = ()

    def __init__(self, source: Path, field: str, *, chat: bool = False) -> None:
        self.source = source
        self.field = field
        self.chat = chat
        self.paths = named(source, SUFFIXES)

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.paths)

    def split(self, share: float) -> Iterator[tuple[bool, Record]]:
        """Go through the lines, each with whether it is held out."""
        return split_rows(self._rows, share, str(self.source))

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with names and contents."""
        return files.fingerprint_of(self.paths, self.source)

    def _rows(self) -> Iterator[Record]:
        for path in self.paths:
            name = files.relative_name(path, self.source)
            try:
                with _opened(path) as file:
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield self._record(f"{name}#{number}", line, f"{path} line {number}")
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise DataError(f"{path} is not whole, or no gzip file: {error}") from error

    def _record(self, name: str, line: bytes, where: str) -> Record:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} must be a JSON object, got {type(row).__name__}")
        if self.field not in row:
            raise DataError(
                f"{where} has no field {self.field!r}; it has {', '.join(map(repr, row))}: "
                "name one with --text-field"
            )
        return record_of(name, row[self.field], chat=self.chat, where=where)


def named(source: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return a file, or the files of a folder that end so.

    Raises:
        DataError: there is none.
    """
    if os.path.isfile(source):
        return [source]
    if not os.path.exists(source):
        raise DataError(f"data path {source} does not exist")
    found = [p for p in files.files_below(source, "*") if p.name.endswith(suffixes)]
    if not found:
        raise DataError(f"data folder {source} holds no file named *{' or *'.join(suffixes)}")
    return found


def _opened(path: Path) -> IO[bytes]:
    if path.name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")
