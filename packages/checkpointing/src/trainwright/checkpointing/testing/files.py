"""A file system in memory that loses power after any operation."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs

from trainwright.checkpointing.protocol import Reader, Writer

_PAGE = 64  # bytes that reach the disk together; small, so that small files tear


class SimulatedCrash(BaseException):
    """The machine lost power: not an error that a program can handle."""


@attrs.define(eq=False)
class _File:
    data: bytearray = attrs.Factory(bytearray)
    synced: bytes = b""


@attrs.define(eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = attrs.Factory(dict)
    synced: dict[str, _File | _Folder] = attrs.Factory(dict)
    # What happened to the names since: (old name or None, new name or None, what they name).
    pending: list[tuple[str | None, str | None, _File | _Folder]] = attrs.Factory(list)

    def change(self, old: str | None, new: str | None, node: _File | _Folder) -> None:
        if old is not None:
            del self.names[old]
        if new is not None:
            self.names[new] = node
        self.pending.append((old, new, node))

    def sync(self) -> None:
        self.synced = dict(self.names)
        self.pending.clear()


class CrashingFiles:
    """`Files` in memory that loses power after a given number of operations.

    What was not synced then may be lost, kept or torn: a file has any length from what was synced
    to what was written, its later pages are there or zeros; of the changes to a folder's names any
    subset has happened, each wholly or not at all.

    Args:
        crash_after: Operations that succeed; the next one raises `SimulatedCrash`, and so does
            every later one. None: no crash.

    Every call of `Files`, `Writer` and `Reader` but ``close`` counts as one operation. Threads may
    share one object.
    """

    def __init__(self, crash_after: int | None = None) -> None:
        self.num_operations = 0
        self.crash_after = crash_after
        self._root = _Folder()
        self._lock = threading.RLock()

    def after_crash(self, seed: int) -> CrashingFiles:
        """Return what the machine finds when it starts again; ``seed`` draws what was lost."""
        survivor = CrashingFiles()
        survivor._root = _restart(self._root, random.Random(seed))
        return survivor

    def paths(self) -> Iterator[Path]:
        """Yield the path of every file."""
        yield from _paths(self._root, Path("/"))

    def flip_bit(self, path: Path, position: int) -> None:
        """Damage a file as a bad disk would."""
        file = self._file(path)
        file.data[position // 8] ^= 1 << position % 8
        file.synced = bytes(file.data)

    def truncate(self, path: Path, length: int) -> None:
        """Shorten a file as a bad copy would."""
        file = self._file(path)
        del file.data[length:]
        file.synced = bytes(file.data)

    def delete(self, path: Path) -> None:
        """Lose a file as a careless hand would."""
        folder = self._folder(path.parent)
        folder.change(path.name, None, self._file(path))
        folder.sync()

    def make_folder(self, folder: Path) -> None:
        """See `Files.make_folder`."""
        with self._operation():
            node = self._root
            for name in folder.parts[1:]:
                child = node.names.get(name)
                if child is None:
                    child = _Folder()
                    node.names[name] = child
                    node.synced[name] = child
                if isinstance(child, _File):
                    raise FileExistsError(errno.EEXIST, "a file is there", str(folder))
                node = child

    def create(self, path: Path) -> Writer:
        """See `Files.create`."""
        with self._operation():
            parent = self._folder(path.parent)
            if path.name in parent.names:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            file = _File()
            parent.change(None, path.name, file)
            return _MemoryWriter(self, file)

    def open(self, path: Path) -> Reader:
        """See `Files.open`."""
        with self._operation():
            return _MemoryReader(self, self._file(path))

    def names(self, folder: Path) -> list[str]:
        """See `Files.names`."""
        with self._operation():
            try:
                return list(self._folder(folder).names)
            except FileNotFoundError:
                return []

    def size(self, path: Path) -> int:
        """See `Files.size`."""
        with self._operation():
            return len(self._file(path).data)

    def rename(self, source: Path, target: Path) -> None:
        """See `Files.rename`; within one folder."""
        with self._operation():
            parent = self._folder(source.parent)
            if source.parent != target.parent or target.name in parent.names:
                raise FileExistsError(errno.EEXIST, "cannot rename", str(target))
            parent.change(source.name, target.name, self._folder(source))

    def sync_folder(self, folder: Path) -> None:
        """See `Files.sync_folder`."""
        with self._operation():
            self._folder(folder).sync()

    def remove_folder(self, folder: Path) -> None:
        """See `Files.remove_folder`; each file removed is one more operation."""
        with self._operation():
            parent = self._folder(folder.parent)
            if folder.name not in parent.names:
                return
            node = self._folder(folder)
        for name in list(node.names):
            with self._operation():
                node.change(name, None, node.names[name])
        with self._operation():
            parent.change(folder.name, None, node)

    def free_bytes(self, folder: Path) -> int | None:
        """See `Files.free_bytes`."""
        return None

    def _operation(self) -> threading.RLock:
        with self._lock:
            if self.crash_after is not None and self.num_operations >= self.crash_after:
                raise SimulatedCrash(f"after {self.crash_after} operations")
            self.num_operations += 1
        return self._lock

    def _folder(self, path: Path) -> _Folder:
        node: _File | _Folder | None = self._root
        for name in path.parts[1:]:
            node = node.names.get(name) if isinstance(node, _Folder) else None
        if not isinstance(node, _Folder):
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
        return node

    def _file(self, path: Path) -> _File:
        node = self._folder(path.parent).names.get(path.name)
        if not isinstance(node, _File):
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return node


class _MemoryWriter:
    def __init__(self, files: CrashingFiles, file: _File) -> None:
        self._files = files
        self._file = file

    def write(self, data: bytes | memoryview) -> None:
        with self._files._operation():
            self._file.data += data

    def sync(self) -> None:
        with self._files._operation():
            self._file.synced = bytes(self._file.data)

    def close(self) -> None:
        return


class _MemoryReader:
    def __init__(self, files: CrashingFiles, file: _File) -> None:
        self._files = files
        self._file = file

    @property
    def size(self) -> int:
        return len(self._file.data)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        with self._files._operation():
            data = self._file.data[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            return len(data)

    def view(self, offset: int, count: int) -> memoryview:
        with self._files._operation():
            return memoryview(bytes(self._file.data[offset : offset + count]))

    def close(self) -> None:
        return


def _paths(folder: _Folder, path: Path) -> Iterator[Path]:
    for name, node in sorted(folder.names.items()):
        if isinstance(node, _File):
            yield path / name
        else:
            yield from _paths(node, path / name)


def _restart(folder: _Folder, rng: random.Random) -> _Folder:
    names = dict(folder.synced)
    for old, new, node in folder.pending:
        if rng.random() < 0.5:
            continue
        if old is not None:
            names.pop(old, None)
        if new is not None:
            names[new] = node
    after = _Folder()
    for name, node in names.items():
        after.names[name] = (
            _restart(node, rng) if isinstance(node, _Folder) else _File(bytearray(_tear(node, rng)))
        )
    after.sync()
    for node in after.names.values():
        if isinstance(node, _File):
            node.synced = bytes(node.data)
    return after


def _tear(file: _File, rng: random.Random) -> bytes:
    data = bytes(file.data)
    synced = len(file.synced)  # files only grow, so this much is as it was
    length = rng.choice([synced, len(data), rng.randint(synced, len(data))])
    torn = bytearray(file.synced)
    for begin in range(synced, length, _PAGE):
        page = data[begin : min(begin + _PAGE, length)]
        torn += rng.choice([page, page, bytes(len(page))])
    return bytes(torn)
