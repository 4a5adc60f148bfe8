"""Opens the files that a foreign folder names, and no other ones."""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from trainwright.checkpointing.errors import (
    DamagedCheckpointError,
    LoadFailedError,
    NoCheckpointError,
    UntrustedError,
)
from trainwright.checkpointing.protocol import Files, Reader
from trainwright.checkpointing.state.files import LocalFiles

from .showing import show

_MAX_OPEN = 32


class Bytes(Protocol):
    """A file that can be read at any position: what this part asks of a `Reader`."""

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the bytes read, fewer only at the end."""
        ...


class Folder:
    """A folder that somebody else has written; its files are opened when asked for.

    Args:
        path: The folder.
        files: The file system.
        follow_links: Whether names in it may be links to files elsewhere.
    """

    def __init__(self, path: Path, files: Files | None, follow_links: bool = False) -> None:
        self.path = path
        self._files = files if files is not None else LocalFiles()
        self._follow_links = follow_links
        self._open: OrderedDict[str, Reader] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False

    def names(self) -> list[str]:
        """Return the names in the folder, sorted.

        Raises:
            NoCheckpointError: There is no such folder, or it is empty.
        """
        try:
            names = sorted(self._files.names(self.path))
        except OSError as error:
            raise NoCheckpointError(f"{self.path} cannot be listed: {error}") from error
        if not names:
            raise NoCheckpointError(f"{self.path} is no folder with files in it")
        return names

    def file(self, name: object) -> FolderFile:
        """Return file ``name`` for reading.

        Raises:
            UntrustedError: The name, or the link that it is, leads out of the folder.
            DamagedCheckpointError: There is no such file.
            LoadFailedError: It cannot be read.
        """
        if not isinstance(name, str):
            raise UntrustedError(f"{self.path} names a file {show(name)}: refused")
        with self._lock:
            return FolderFile(self, name, self._get(name).size)

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return all of file ``name``.

        Raises:
            DamagedCheckpointError: It is not there, or longer than ``max_bytes``.
        """
        reader = self.file(name)
        if reader.size > max_bytes:
            raise DamagedCheckpointError(
                f"{self.path / name} is damaged: {reader.size} bytes, at most {max_bytes} are read"
            )
        return bytes(read_exactly(reader, 0, reader.size, self.path / name))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from file ``name``; returns the bytes read."""
        with self._lock:
            return self._get(name).read_into(offset, buffer)

    def close(self) -> None:
        """Release all files; nothing can be read any more."""
        with self._lock:
            self._is_closed = True
            while self._open:
                self._open.popitem()[1].close()

    def _get(self, name: str) -> Reader:
        if self._is_closed:
            raise LoadFailedError(f"{self.path} has been closed; read before the close")
        if name not in self._open:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[name] = self._open_file(name)
        self._open.move_to_end(name)
        return self._open[name]

    def _open_file(self, name: str) -> Reader:
        path = self.path / check_name(name, self.path)
        try:
            real = os.path.realpath(path)
            if not self._follow_links and os.path.dirname(real) != os.path.realpath(self.path):
                raise UntrustedError(
                    f"{path} is a link to {real}, outside of the folder: refused; if you trust "
                    "where it leads (the Hugging Face cache is made of such links), pass "
                    "follow_links=True"
                )
            if os.path.exists(real) and not stat.S_ISREG(os.stat(real).st_mode):
                raise UntrustedError(f"{path} is no regular file: refused")
            return self._files.open(path)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{path} is missing") from error
        except (OSError, ValueError) as error:
            raise LoadFailedError(f"{path} cannot be read: {error}") from error


class FolderFile:
    """`Bytes` of one file of a folder, which opens it again where it had to close it."""

    def __init__(self, folder: Folder, name: str, size: int) -> None:
        self._folder = folder
        self._name = name
        self._size = size

    @property
    def size(self) -> int:
        """Length in bytes when it was first opened."""
        return self._size

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the bytes read."""
        return self._folder.read_into(self._name, offset, buffer)


def check_name(name: str, folder: Path) -> str:
    """Return ``name``, the plain name of a file in ``folder``.

    Raises:
        UntrustedError: It is a path, or no name of a file.
    """
    if name in ("", ".", "..") or len(name) > 255 or any(c in name for c in "/\\\0:"):
        raise UntrustedError(f"{folder} names a file {show(name)}, which may lie outside: refused")
    return name


def read_exactly(reader: Bytes, offset: int, count: int, source: Path | str) -> bytearray:
    """Return bytes of a file, all of which must be there: nothing is allocated before that is sure.

    Raises:
        DamagedCheckpointError: The file is shorter.
        LoadFailedError: It cannot be read.
    """
    return read_rows(reader, (offset, 0, 1), count, source)


def read_rows(
    reader: Bytes, rows: tuple[int, int, int], count: int, source: Path | str
) -> bytearray:
    """Return ``count`` bytes at each of some places of a file, one after the other.

    Args:
        reader: The file.
        rows: The first place, bytes from one place to the next, number of places.
        count: Bytes at each.
        source: What it is, for messages.

    Raises:
        DamagedCheckpointError: The file is shorter; nothing has been allocated.
        LoadFailedError: It cannot be read.
    """
    begin, step, num_rows = rows
    end = begin + step * (num_rows - 1) + count
    if not 0 <= begin <= end <= reader.size or count < 0 or step < 0:
        raise DamagedCheckpointError(
            f"{source} is damaged: bytes {begin} to {end} of {reader.size}"
        )
    buffer = bytearray(num_rows * count)
    view = memoryview(buffer)
    try:
        for number in range(num_rows):
            place = view[number * count : (number + 1) * count]
            if reader.read_into(begin + number * step, place) != count:
                raise DamagedCheckpointError(
                    f"{source} is damaged: it became shorter while being read"
                )
    except OSError as error:
        raise LoadFailedError(f"{source} cannot be read: {error}") from error
    return buffer
