"""Keeps tensors in a file that has no name, so that nothing is left even where a run is killed."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpointing.errors import OffloadError, PolicyError

from .offload import Offload, Stored

_ALIGNMENT = 4096


class FileStorage:
    """One file without a name in ``folder``, written and read by a thread beside the computing.

    The file is opened at the first tensor. What is freed is used again. The system removes the file
    when the process ends, however it ends. A tensor is copied before it is written, so that it may
    change; at most ``waiting_bytes`` of copies wait for the disk.

    Args:
        folder: A folder that exists, best on a fast local disk.
        waiting_bytes: Bytes of copies that may wait to be written.

    Raises:
        PolicyError: There is no such folder, or it cannot be written to.
    """

    def __init__(self, folder: str | Path, *, waiting_bytes: int = 1 << 28) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir() or not os.access(self.folder, os.W_OK | os.X_OK):
            raise PolicyError(
                f"activations cannot be written to {str(folder)!r}: it is no folder that can be "
                "written to; create it first"
            )
        self.waiting_bytes = waiting_bytes
        self._lock = threading.Condition()
        self._waiting = 0
        self._space = _Space()
        self._freed: deque[tuple[int, int]] = deque()
        self._file: _File | None = None

    @property
    def file_bytes(self) -> int:
        """The length of the file: most bytes held at once, and gaps."""
        return self._space.end

    def store(self, elements: torch.Tensor) -> Stored:
        """Copy the elements aside and let them be written."""
        copy = torch.empty(elements.shape, dtype=elements.dtype).copy_(elements)
        size = copy.numel() * copy.element_size()
        with self._lock:
            # A tensor that is larger than all that may wait goes alone.
            self._lock.wait_for(lambda: not self._waiting or self._fits(size))
            self._waiting += size
            while self._freed:
                self._space.give_back(*self._freed.popleft())
            place = self._space.take(size)
            if self._file is None:
                self._file = _open(self.folder)
        stored = _InFile(self._file, place, size, self._file.submit(self._write, copy, place))
        # A finaliser may run anywhere, also where this thread holds the lock.
        # The place may be given on at once: one thread does everything in order.
        weakref.finalize(stored, self._freed.append, (place, size)).atexit = False
        return stored

    def _fits(self, size: int) -> bool:
        return self._waiting + size <= self.waiting_bytes

    def _write(self, copy: torch.Tensor, place: int) -> None:
        view = _bytes_of(copy)
        assert self._file is not None
        try:
            self._file.write(view, place)
        finally:
            with self._lock:
                self._waiting -= view.nbytes
                self._lock.notify_all()


class _InFile:
    """Bytes at a place of the file."""

    def __init__(self, file: _File, place: int, size: int, written: Future[None]) -> None:
        self._written = written
        self._file = file
        self._place = place
        self._size = size
        self._read: Future[torch.Tensor] | None = None

    def begin_load(self) -> None:
        if self._read is None:
            self._read = self._file.submit(self._file.read, self._place, self._size)

    def load(self, target: torch.Tensor) -> None:
        self.begin_load()
        assert self._read is not None
        read, self._read = self._read, None
        self._written.result()  # raises what writing raised
        data = read.result()
        target.copy_(data.view(target.dtype).view(target.shape))


class _File:
    """An open file without a name, and the one thread that works on it in order."""

    def __init__(self, descriptor: int, folder: Path) -> None:
        self._descriptor = descriptor
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="activations")
        weakref.finalize(self, _close, descriptor, self._thread).atexit = False
        self.submit = self._thread.submit

    def write(self, view: memoryview, place: int) -> None:
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._descriptor, view[done:], place + done)
            except OSError as error:
                raise self._failed("written to", error) from error

    def read(self, place: int, size: int) -> torch.Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        view = _bytes_of(data)
        done = 0
        while done < size:
            try:
                count = os.preadv(self._descriptor, [view[done:]], place + done)
            except OSError as error:
                raise self._failed("read from", error) from error
            if not count:
                raise OffloadError(f"a file of activations in {self._folder} is too short")
            done += count
        return data

    def _failed(self, what: str, error: OSError) -> OffloadError:
        return OffloadError(
            f"activations could not be {what} {self._folder}: {error}; offload to a folder with "
            "space, or to cpu"
        )


class _Space:
    """Which parts of a file are free; those that touch become one."""

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # starts and ends, in order

    def take(self, size: int) -> int:
        size = _rounded(size)
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[number : number + 1] = [(start + size, end)] * (end - start > size)
                return start
        start, self.end = self.end, self.end + size
        return start

    def give_back(self, start: int, size: int) -> None:
        parts = sorted([*self._free, (start, start + _rounded(size))])
        merged: list[tuple[int, int]] = []
        for first, last in parts:
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            elif last > first:
                merged.append((first, last))
        self._free = merged


def offload_to_folder(
    folder: str | Path, *, min_bytes: int = 0, ahead: int = 1, waiting_bytes: int = 1 << 28
) -> Offload:
    """Return the keeper that holds tensors in a file without a name in ``folder``.

    Bitwise, strides included; see `FileStorage`.

    Args:
        folder: A folder that exists.
        min_bytes: Smaller tensors stay where they are.
        ahead: How many tensors are read before backward asks for them.
        waiting_bytes: Bytes of copies that may wait to be written.

    Raises:
        PolicyError: There is no such folder.
        OffloadError: In the forward or backward, if the file cannot be written or read.
    """
    storage = FileStorage(folder, waiting_bytes=waiting_bytes)
    return Offload(storage, min_bytes=min_bytes, ahead=ahead)


def _open(folder: Path) -> _File:
    flags = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
    try:
        if hasattr(os, "O_TMPFILE"):
            try:
                return _File(os.open(folder, flags, 0o600), folder)
            except OSError:
                pass  # not every file system makes files without a name
        # A file that is removed while it is open lives until it is closed.
        descriptor, name = tempfile.mkstemp(prefix=".activations-", dir=folder)
        os.unlink(name)
    except OSError as error:
        raise OffloadError(f"no file of activations could be made in {folder}: {error}") from error
    return _File(descriptor, folder)


def _close(descriptor: int, thread: ThreadPoolExecutor) -> None:
    # Without waiting: what was to be written is of no use to anybody any more.
    thread.submit(os.close, descriptor)
    thread.shutdown(wait=False)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _rounded(size: int) -> int:
    return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT
