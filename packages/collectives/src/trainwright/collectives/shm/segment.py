"""The memory of one process that its peers can read and write."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque

import numpy
import torch

from trainwright.collectives.errors import CollectiveError

# A process of most systems has eight times as many.
_MAX_ADDRESSES = 1 << 44
_MAX_CACHED = 4096
_MIN_BLOCK = 256
_LARGE_BLOCK = 1 << 20
# Freed memory up to this many bytes stays with the process: fresh pages are dear.
_MAX_KEPT_BYTES = 256 << 20


def capacity(size: int) -> int:
    """Return how many bytes each of ``size`` segments may grow to.

    Memory is only taken where it is touched, but addresses for all segments in every process.
    """
    physical = int(os.sysconf("SC_PHYS_PAGES")) * mmap.PAGESIZE
    pages = min(2 * physical, _MAX_ADDRESSES // size) // mmap.PAGESIZE
    return pages * mmap.PAGESIZE


def create_file(num_bytes: int) -> int:
    """Return the descriptor of an anonymous file, which vanishes with the last of its users."""
    file = os.memfd_create("trainwright", os.MFD_CLOEXEC)
    os.ftruncate(file, num_bytes)
    return file


class Segment:
    """One process's shared memory as seen from this one.

    ``words`` are its 64-bit numbers, ``base`` is the address where it begins here.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        self.map = mmap.mmap(file, num_bytes)
        self.map.madvise(mmap.MADV_DONTDUMP)
        self.words = memoryview(self.map).cast("Q")
        self.num_bytes = num_bytes
        # Views of a plain tensor may be written inside and outside of inference mode.
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.base = self._bytes.data_ptr()
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements that begin ``offset`` bytes into the segment."""
        key = (offset, numel, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_CACHED:
                self._views.clear()
            # Kept for calls outside of inference mode, which may not write what is made inside.
            with torch.inference_mode(False):
                found = self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)
            self._views[key] = found
        return found

    def find(self, tensor: torch.Tensor) -> int | None:
        """Return where a contiguous tensor begins, if it lies in this segment."""
        offset = tensor.data_ptr() - self.base
        return offset if 0 <= offset < self.num_bytes else None


class Arena:
    """Hands out blocks of this process's segment, and tensors that live there."""

    def __init__(self, segment: Segment, start: int) -> None:
        self._segment = segment
        self._next = start
        self._free: dict[int, list[int]] = {}
        self._kept_bytes = 0
        self._mutex = threading.Lock()
        # Tensors end inside of any statement, perhaps one that holds the mutex.
        self._returned: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> int:
        """Return the offset of a block of at least ``num_bytes``, on a cache line of its own."""
        size = _block_size(num_bytes)
        with self._mutex:
            while self._returned:
                self._put_locked(*self._returned.popleft())
            free = self._free.get(size)
            if free:
                self._kept_bytes = max(0, self._kept_bytes - size)
                return free.pop()
            return self._extend_locked(size)

    def take_zeros(self, num_bytes: int) -> int:
        """Return a block that nobody has used before, which is never given back."""
        with self._mutex:
            return self._extend_locked(_block_size(num_bytes))

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Take back a block that no process uses any more."""
        self._returned.append((offset, num_bytes))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor without values; its memory comes back when it ends."""
        numel = 1
        for length in shape:
            numel *= length
        num_bytes = numel * dtype.itemsize
        offset = self.take(num_bytes)
        if num_bytes == 0:
            self.give_back(offset, num_bytes)
            return torch.empty(shape, dtype=dtype)
        memory = numpy.ndarray((num_bytes,), numpy.uint8, self._segment.map, offset)
        ended = weakref.finalize(memory, self.give_back, offset, num_bytes)
        ended.atexit = False
        return torch.from_numpy(memory).view(dtype).view(shape)

    def _extend_locked(self, size: int) -> int:
        # Only whole pages can be returned to the system.
        grain = min(size, mmap.PAGESIZE)
        offset = -(-self._next // grain) * grain
        if offset + size > self._segment.num_bytes:
            raise CollectiveError(
                f"shared memory of {self._segment.num_bytes} bytes has no room for {size} more; "
                "drop tensors made by empty()"
            )
        self._next = offset + size
        return offset

    def _put_locked(self, offset: int, num_bytes: int) -> None:
        size = _block_size(num_bytes)
        if size >= _LARGE_BLOCK and self._kept_bytes + size > _MAX_KEPT_BYTES:
            self._segment.map.madvise(mmap.MADV_REMOVE, offset, size)
        else:
            self._kept_bytes += size
        self._free.setdefault(size, []).append(offset)


def _block_size(num_bytes: int) -> int:
    if num_bytes > _LARGE_BLOCK:
        return -(-num_bytes // _LARGE_BLOCK) * _LARGE_BLOCK
    return max(_MIN_BLOCK, 1 << max(num_bytes - 1, 0).bit_length())
