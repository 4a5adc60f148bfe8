"""Checkpoint files on a file system of the operating system."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
from pathlib import Path

import attrs

from trainwright.checkpointing.protocol import Reader, Writer

# File systems that have no way to sync a folder say so with one of these.
_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP)
# So much is written before the disk is asked to begin. Measured: 8 MiB better than 32.
_HAND_OVER_BYTES = 8 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it


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
        self._written = 0
        self._handed_over = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            count = os.write(self._descriptor, view)
            view = view[count:]
            self._written += count
            self._hand_over()

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _hand_over(self) -> None:
        """Let the disk begin now, so that it works while the next bytes are made."""
        start, count = self._handed_over, self._written - self._handed_over
        if count < _HAND_OVER_BYTES or not hasattr(os, "posix_fadvise"):
            return
        # Pages that nobody wants in memory are written out at once and without waiting.
        os.posix_fadvise(self._descriptor, start, count, os.POSIX_FADV_DONTNEED)
        self._handed_over = self._written


class _LocalReader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._mapped = _map(descriptor, self._size)

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

    def view(self, offset: int, count: int) -> memoryview:
        count = max(0, min(count, self._size - offset))
        if self._mapped is not None and count and _bring(self._mapped, offset, count):
            return memoryview(self._mapped)[offset : offset + count]
        copy = memoryview(bytearray(count))
        return copy[: self.read_into(offset, copy)]

    def close(self) -> None:
        self._mapped = None  # unmapped once no view is left
        os.close(self._descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap | None:
    if size == 0 or not sys.platform.startswith("linux"):
        return None
    try:
        return mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    except OSError:
        return None  # not every file system can


def _bring(mapped: mmap.mmap, offset: int, count: int) -> bool:
    """Read a part of the file into memory; False where that fails or cannot be told.

    Without it, a disk that fails would end the process by a signal when the bytes are looked at.
    """
    first = offset - offset % mmap.PAGESIZE
    try:
        mapped.madvise(_MADV_POPULATE_READ, first, offset + count - first)
    except OSError:
        return False
    return True
