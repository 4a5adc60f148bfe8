"""Files that fail late: what else is done with all ranks goes on to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainwright.checkpointing.protocol import Files, Reader, Writer

T = TypeVar("T")


class PatientFiles:
    """Writes a new folder; after the first failure nothing more, which the renaming then raises.

    A rank that stopped in the midst of a folder would leave the others waiting for it in the
    reductions that bring the next block. Without files, as on ranks that do not write, nothing is
    done and nothing fails.

    Args:
        files: The file system; None: none.
    """

    def __init__(self, files: Files | None) -> None:
        self._files = files
        self._error: Exception | None = None

    def make_folder(self, folder: Path) -> None:
        """Create a folder and what leads to it."""
        self._try(lambda files: files.make_folder(folder), None)

    def create(self, path: Path) -> Writer:
        """Open a new file for writing."""
        opened: Writer | None = None
        return _PatientWriter(self, self._try(lambda files: files.create(path), opened))

    def open(self, path: Path) -> Reader:
        """Refuse: a folder that is being written is not read."""
        raise OSError(f"{path} is being written")

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder."""
        return self._try(lambda files: files.names(folder), [])

    def size(self, path: Path) -> int:
        """Return the length of a file."""
        return self._try(lambda files: files.size(path), 0)

    def rename(self, source: Path, target: Path) -> None:
        """Give the folder its name, or raise what went wrong before."""
        if self._error is not None:
            raise self._error
        if self._files is not None:
            self._files.rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Sync the names in a folder."""
        self._try(lambda files: files.sync_folder(folder), None)

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder, also after a failure."""
        if self._files is not None:
            self._files.remove_folder(folder)

    def free_bytes(self, folder: Path) -> int | None:
        """Return the space left, if it can be told."""
        return self._try(lambda files: files.free_bytes(folder), None)

    def attempt(self, work: Callable[[], object]) -> None:
        """Do some of the writing, unless some has failed; remember where it fails."""
        self._try(lambda _: work(), None)

    def _try(self, work: Callable[[Files], T], otherwise: T) -> T:
        if self._files is None or self._error is not None:
            return otherwise
        try:
            return work(self._files)
        except Exception as error:
            self._error = error
            return otherwise


class _PatientWriter:
    def __init__(self, files: PatientFiles, writer: Writer | None) -> None:
        self._files = files
        self._writer = writer

    def write(self, data: bytes | memoryview) -> None:
        if self._writer is not None:
            writer = self._writer
            self._files.attempt(lambda: writer.write(data))

    def sync(self) -> None:
        if self._writer is not None:
            self._files.attempt(self._writer.sync)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
