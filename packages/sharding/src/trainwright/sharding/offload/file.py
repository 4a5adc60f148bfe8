"""A file without a name as a place for states: nothing of it is left, however the process ends."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import attrs
import torch

from trainwright.collectives import Work
from trainwright.sharding.offload.errors import OffloadError
from trainwright.sharding.offload.lanes import Lane, Pace
from trainwright.sharding.offload.ledger import Ledger

_ALIGNMENT = max(4096, mmap.ALLOCATIONGRANULARITY)


@attrs.frozen(eq=False)
class FileSlot:
    """Elements in a file.

    Args:
        store: Which file.
        start: Its first byte there.
        tensor: The elements as the file has them, mapped: what is read and written there passes
            through the system's cache, which gives memory back as it is needed.
    """

    store: FileStore
    start: int
    tensor: torch.Tensor

    def read(self, target: torch.Tensor) -> Work:
        """Start copying the elements into contiguous host memory of their size in bytes."""
        return self.store.read(self.start, target)

    def write(self, source: torch.Tensor) -> Work:
        """Start copying them back; ``source`` belongs to it until it is waited for."""
        return self.store.write(self.start, source)


class FileStore:
    """One file without a name in a folder, read and written by a thread each beside computing.

    Space is allocated before anything is put into it: a full disk is met there. The system removes
    the file when the process ends, even where it is killed; its space comes back as a whole, once
    nobody has the store or one of its slots.

    Args:
        folder: A folder that exists, best on a fast local disk.
        pace: A rate that reads and writes share, for tests and measurements.

    Raises:
        OffloadError: There is no such folder, or no file can be made in it.
    """

    def __init__(self, folder: str | Path, *, pace: Pace | None = None) -> None:
        self.folder = Path(folder)
        self.ledger = Ledger("host memory")
        self._descriptor = _open(self.folder)
        weakref.finalize(self, os.close, self._descriptor)
        self.reads = Lane("offload-reads", pace, depth=4)
        self.writes = Lane("offload-writes", pace, depth=4)
        self._lock = threading.Lock()
        self._region: tuple[int, mmap.mmap] | None = None
        self._mapped: list[range] = []
        self._used = 0
        self._reserved = 0

    @property
    def file_bytes(self) -> int:
        """Bytes of the disk that the file has."""
        return self._reserved

    def reserve(self, sizes: Iterable[int]) -> None:
        """Have space on the disk for slots of these sizes, beside those that there are.

        Raises:
            OffloadError: The disk has not, or the file cannot be mapped; what is there stays as it
                is.
        """
        num_bytes = sum(_up(size) for size in sizes)
        with self._lock:
            end = self._used + num_bytes
            if end <= self._reserved:
                return
            try:
                os.posix_fallocate(self._descriptor, self._reserved, end - self._reserved)
            except OSError as error:
                raise OffloadError(
                    f"{self.folder} has no space for {num_bytes:,} bytes of model states "
                    f"({error.strerror}); free some, share states over more ranks, or offload to "
                    "another folder"
                ) from error
            self._map(end)
            self._reserved = end

    def _map(self, end: int) -> None:
        # One mapping for all slots to come: each has a descriptor, of which there are few.
        try:
            mapped = mmap.mmap(self._descriptor, end - self._used, offset=self._used)
        except (OSError, ValueError) as error:
            raise OffloadError(
                f"{end - self._used:,} bytes of a file of model states in {self.folder} cannot be "
                f"mapped ({error}); raise the limits on address space (ulimit -v) and open files "
                "(ulimit -n), or share states over more ranks"
            ) from error
        self._region = (self._used, mapped)
        first = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._mapped.append(range(first, first + len(mapped)))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> FileSlot:
        """Return a place for elements in the file.

        Raises:
            OffloadError: The disk is full, or the file cannot be mapped.
        """
        size = numel * dtype.itemsize
        self.reserve([size])
        with self._lock:
            start = self._used
            self._used += _up(size)
            assert self._region is not None
            first, mapped = self._region
        tensor = torch.frombuffer(mapped, dtype=dtype, count=numel, offset=start - first)
        return FileSlot(self, start, tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's elements are in the file, and not in memory."""
        return any(tensor.data_ptr() in mapped for mapped in self._mapped)

    def read(self, start: int, target: torch.Tensor) -> Work:
        """Start reading what begins at a byte of the file."""
        size = target.numel() * target.itemsize
        return self.reads.submit(partial(self._read, start, target), size)

    def write(self, start: int, source: torch.Tensor) -> Work:
        """Start writing at a byte of the file."""
        size = source.numel() * source.itemsize
        return self.writes.submit(partial(self._write, start, source), size)

    def _read(self, start: int, target: torch.Tensor) -> None:
        view = _bytes_of(target)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise self._failed("read from", error) from error
            if not count:
                raise OffloadError(f"a file of model states in {self.folder} is too short")
            done += count

    def _write(self, start: int, source: torch.Tensor) -> None:
        view = _bytes_of(source)
        done = 0
        while done < len(view):
            try:
                done += os.pwritev(self._descriptor, [view[done:]], start + done)
            except OSError as error:
                raise self._failed("written to", error) from error

    def _failed(self, what: str, error: OSError) -> OffloadError:
        return OffloadError(f"model states could not be {what} {self.folder}: {error}")


def _open(folder: Path) -> int:
    if not folder.is_dir():
        raise OffloadError(f"model states cannot be kept in {str(folder)!r}: it is no folder")
    try:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:  # a file system without files that have no name
            descriptor, name = tempfile.mkstemp(prefix=".offload-", dir=folder)
            os.unlink(name)
            return descriptor
    except OSError as error:
        raise OffloadError(
            f"model states cannot be kept in {str(folder)!r}: {error.strerror}"
        ) from error


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # Not by way of NumPy, whose views forbid for ever that a storage is resized.
    assert tensor.is_contiguous()
    size = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _up(size: int) -> int:
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
