"""Text files, each a document."""

from __future__ import annotations

import codecs
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
        DataError: the path is missing, empty or holds no text.
    """

    def __init__(self, source: Path, pattern: str = "*", *, whole_characters: bool = False) -> None:
        if not os.path.exists(source):
            raise DataError(
                f"data path {source} does not exist; give a text file or a folder of them"
            )
        self.source = source
        self.whole_characters = whole_characters
        self.skipped: tuple[str, ...] = ()
        if os.path.isfile(source):
            self._check(source)
            self.paths = [source]
        else:
            self.paths = self._look_through(pattern)

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

    def _look_through(self, pattern: str) -> list[Path]:
        found, skipped = [], []
        for path in files.files_below(self.source, pattern):
            if not path.stat().st_size:
                continue
            if is_text(path):
                found.append(path)
            else:
                skipped.append(files.relative_name(path, self.source))
        if not found:
            reason = "holds only binary files" if skipped else "holds no file with text"
            raise DataError(
                f"data folder {self.source} {reason} (names like {pattern}); give text files"
            )
        self.skipped = tuple(skipped)
        return found


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
    """Read a part of a file in pieces that end with lines, but for the last."""
    left = (path.stat().st_size if stop is None else stop) - start
    rest = b""
    with path.open("rb") as file:
        file.seek(start)
        while left > 0:
            block = file.read(min(files.BLOCK, left))
            if not block:
                raise DataError(f"data file {path} became shorter while it was read")
            left -= len(block)
            end = block.rfind(b"\n") + 1
            if left > 0 and end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
    if rest:
        yield rest
