"""Checkpoint files on a file system of the operating system."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import attrs

from trainwright.checkpointing.protocol import Reader, Writer

# File systems that have no way to sync a folder say so with one of these.
_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP)


@attrs.frozen
class LocalFiles:
    """`Files` on the paths of this machine: POSIX calls, nothing cached."""

    def make_folder(self, folder: Path) -> None:
        """Create ``folder`` and what leads to it, and make that durable."""
        if folder.is_dir():
            return
        self.make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        self.sync_folder(folder.parent)

    def create(self, path: Path) -> Writer:
        """Open a new file for writing."""
        return _LocalWriter(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        )

    def open(self, path: Path) -> Reader:
        """Open a file for reading."""
        return _LocalReader(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def names(self, folder: Path) -> list[str]:
        """Return the names in ``folder``; none if there is no such folder."""
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        """Return the length of a file in bytes."""
        return path.stat().st_size

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder a new name."""
        if target.exists():  # an empty folder would be replaced in silence
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        source.rename(target)

    def sync_folder(self, folder: Path) -> None:
        """Return once the names in ``folder`` would survive a power failure."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC_FOLDERS:
                raise
        finally:
            os.close(descriptor)

    def remove_folder(self, folder: Path) -> None:
        """Remove ``folder`` and all that is in it."""
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return

    def free_bytes(self, folder: Path) -> int | None:
        """Return the space left where ``folder`` lies."""
        try:
            usage = shutil.disk_usage(folder)
        except OSError:
            return None
        return usage.free if usage.total > 0 else None  # some network file systems say 0 of 0


class _LocalWriter:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _LocalReader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)
