"""Files of rows, each a document or a conversation with a name of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from trainwright.integration.data.sources import files
from trainwright.integration.data.sources.holding_out import split_rows
from trainwright.integration.data.sources.record import Record
from trainwright.integration.errors import DataError


@attrs.frozen(eq=False)
class RowFiles:
    """The rows of some files, one file after another.

    Args:
        source: the file, or the folder that holds them.
        candidates: the files.
        read: goes through the rows of a file, whose names begin with the one given.
    """

    source: Path
    candidates: list[Path]
    read: Callable[[Path, str], Iterator[Record]]
    skipped: tuple[str, ...] = ()

    @property
    def files(self) -> int:
        """Number of files."""
        return len(self.candidates)

    def split(self, share: float) -> Iterator[tuple[bool, Record]]:
        """Go through the rows, each with whether it is held out."""
        return split_rows(self._rows, share, str(self.source))

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with names and contents."""
        return files.fingerprint_of(self.candidates, self.source)

    def _rows(self) -> Iterator[Record]:
        for path in self.candidates:
            yield from self.read(path, files.relative_name(path, self.source))


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
