"""Text files, each a document."""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from trainwright.integration.data.sources import files
from trainwright.integration.data.sources.holding_out import chosen
from trainwright.integration.data.sources.record import Document, Record
from trainwright.integration.errors import DataError


class TextFiles:
    """A text file, or every text file below a folder in order of its relative name.

    Which files are held out depends on their relative names alone; at least one file is, and at
    least one is not. Of a single file the last bytes are held out.

    Args:
        source: a file, or a folder; hidden folders, ``__pycache__`` and ``site-packages`` in it
            are passed over.
        pattern: shell pattern of the file names that count in a folder.
        whole_characters: whether a single file is cut between characters, not bytes.

    Raises:
        DataError: the path is missing; where files are asked for, they are empty or hold no text.
    """

    def __init__(self, source: Path, pattern: str = "*", *, whole_characters: bool = False) -> None:
        if not os.path.exists(source):
            raise DataError(
                f"data path {source} does not exist; give a text file or a folder of them"
            )
        self.source = source
        self.pattern = pattern
        self.whole_characters = whole_characters

    @functools.cached_property
    def candidates(self) -> list[Path]:
        """The files that may be text, found without reading any."""
        if os.path.isfile(self.source):
            return [self.source]
        return [p for p in files.files_below(self.source, self.pattern) if p.stat().st_size]

    @functools.cached_property
    def paths(self) -> list[Path]:
        """The files of text, of which every byte has been looked at."""
        if os.path.isfile(self.source):
            self._check(self.source)
            return self.candidates
        found = [path for path in self.candidates if is_text(path)]
        if not found:
            reason = "only binary files" if self.candidates else "no file with text"
            raise DataError(
                f"data folder {self.source} holds {reason} (names like {self.pattern}); give text "
                "files"
            )
        return found

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of the files that are not text."""
        read = set(self.paths)
        left = (path for path in self.candidates if path not in read)
        return tuple(files.relative_name(path, self.source) for path in left)

    @property
    def files(self) -> int:
        """Number of text files."""
        return len(self.paths)

    def split(self, share: float) -> Iterator[tuple[bool, Record]]:
        """Go through the files, each with whether it is held out."""
        if len(self.paths) == 1 and share > 0:
            yield from self._cut(self.paths[0], share)
            return
        names = {files.relative_name(path, self.source): path for path in self.paths}
        held_out = chosen(names, share)
        for name, path in names.items():
            yield held_out(name), Document(name, pieces_of(path))

    def fingerprint(self) -> str:
        """Return hexadecimal digits that change with names and contents."""
        return files.fingerprint_of(self.paths, self.source)

    def _cut(self, path: Path, share: float) -> Iterator[tuple[bool, Record]]:
        size = path.stat().st_size
        cut = size - int(size * share)
        if self.whole_characters:
            with path.open("rb") as file:
                file.seek(cut)
                following = file.read(4)
            # Bytes 10xxxxxx go on with a character.
            cut += next((i for i, b in enumerate(following) if b & 0xC0 != 0x80), len(following))
        yield False, Document(path.name, pieces_of(path, 0, cut))
        yield True, Document(path.name, pieces_of(path, cut, size))

    def _check(self, path: Path) -> None:
        if not path.stat().st_size:
            raise DataError(f"data file {path} is empty; give a file with text")
        if not is_text(path):
            raise DataError(f"data file {path} is binary, not text; give a text file")


def is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without zero bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in files.blocks_of(path):
            if b"\0" in block:
                return False
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def pieces_of(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Read a part of a file in pieces that end with lines, but for the last.

    Where a line is longer than a block it is cut behind a space, or else between characters, so
    that never more than a few blocks are in memory.
    """
    left = (path.stat().st_size if stop is None else stop) - start
    rest = b""
    with path.open("rb") as file:
        file.seek(start)
        while left > 0:
            block = file.read(min(files.BLOCK, left))
            if not block:
                raise DataError(f"data file {path} became shorter while it was read")
            left -= len(block)
            rest += block
            end = _cut(rest)
            if left > 0 and end:
                yield rest[:end]
                rest = rest[end:]
    if rest:
        yield rest


def _cut(text: bytes) -> int:
    """Return where a piece may end; 0 where more must be read."""
    end = text.rfind(b"\n") + 1
    if end or len(text) <= 2 * files.BLOCK:
        return end
    end = text.rfind(b" ") + 1
    if end:
        return end
    # Bytes 10xxxxxx go on with a character.
    return next((k for k in range(len(text) - 1, len(text) - 5, -1) if text[k] & 0xC0 != 0x80), 0)
