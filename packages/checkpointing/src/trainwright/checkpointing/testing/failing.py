"""A file system of which one operation fails."""

from __future__ import annotations

from pathlib import Path

import attrs

from trainwright.checkpointing.protocol import Files, Reader, Writer


@attrs.define(eq=False)
class FailingFiles:
    """Another `Files` of which one operation fails: a full disk, a lost permission.

    Args:
        inner: Where everything else goes.
        operation: Name of a method of `Files`, or ``write``, ``sync`` of its writers, or ``read``
            for both ways in which its readers read.
        error: What it raises, each time.
        after: Successes before the first failure; for ``write`` bytes, for others calls.
    """

    inner: Files
    operation: str
    error: OSError
    after: int = 0

    def _spend(self, operation: str, amount: int = 1) -> None:
        if operation != self.operation:
            return
        if self.after < amount:
            raise self.error
        self.after -= amount

    def make_folder(self, folder: Path) -> None:
        """See `Files.make_folder`."""
        self._spend("make_folder")
        self.inner.make_folder(folder)

    def create(self, path: Path) -> Writer:
        """See `Files.create`."""
        self._spend("create")
        return _FailingWriter(self, self.inner.create(path))

    def open(self, path: Path) -> Reader:
        """See `Files.open`."""
        self._spend("open")
        return _FailingReader(self, self.inner.open(path))

    def names(self, folder: Path) -> list[str]:
        """See `Files.names`."""
        self._spend("names")
        return self.inner.names(folder)

    def size(self, path: Path) -> int:
        """See `Files.size`."""
        self._spend("size")
        return self.inner.size(path)

    def rename(self, source: Path, target: Path) -> None:
        """See `Files.rename`."""
        self._spend("rename")
        self.inner.rename(source, target)

    def sync_folder(self, folder: Path) -> None:
        """See `Files.sync_folder`."""
        self._spend("sync_folder")
        self.inner.sync_folder(folder)

    def remove_folder(self, folder: Path) -> None:
        """See `Files.remove_folder`."""
        self._spend("remove_folder")
        self.inner.remove_folder(folder)

    def free_bytes(self, folder: Path) -> int | None:
        """See `Files.free_bytes`."""
        return self.inner.free_bytes(folder)


@attrs.define(eq=False)
class _FailingWriter:
    files: FailingFiles
    inner: Writer

    def write(self, data: bytes | memoryview) -> None:
        room = self.files.after
        if self.files.operation == "write" and room < len(data):
            self.inner.write(data[:room])  # as a full disk does: a part still fits
        self.files._spend("write", len(data))
        self.inner.write(data)

    def sync(self) -> None:
        self.files._spend("sync")
        self.inner.sync()

    def close(self) -> None:
        self.inner.close()


@attrs.define(eq=False)
class _FailingReader:
    files: FailingFiles
    inner: Reader

    @property
    def size(self) -> int:
        return self.inner.size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        self.files._spend("read")
        return self.inner.read_into(offset, buffer)

    def view(self, offset: int, count: int) -> memoryview:
        self.files._spend("read")
        return self.inner.view(offset, count)

    def close(self) -> None:
        self.inner.close()
