"""Buffers for what arrives from peers, used again: fresh memory costs as much as the transfer."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

_MAX_KEPT_BYTES = 64 << 20
# Small ones are cheap to allocate; what takes time is to cut them into rows.
_MIN_KEPT_BYTES = 1 << 16
_MAX_SMALL_KINDS = 256
_MAX_SMALL_EACH = 4


class Rows(NamedTuple):
    """A tensor of several rows, and the rows."""

    whole: torch.Tensor
    rows: tuple[torch.Tensor, ...]


class Scratch:
    """Hands out tensors without values and keeps some of those that come back."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._kept_bytes = 0
        self._small: dict[tuple[int, int, torch.dtype], list[Rows]] = {}
        self._mutex = threading.Lock()

    def take(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor of the dtype and on the device of ``like``."""
        num_bytes = math.prod(shape) * like.element_size()
        if num_bytes >= _MIN_KEPT_BYTES:
            with self._mutex:
                free = self._free.get(num_bytes)
                if free:
                    self._kept_bytes -= num_bytes
                    return free.pop().view(like.dtype).view(*shape)
        return like.new_empty(tuple(shape))

    def give_back(self, tensor: torch.Tensor) -> None:
        """Take back what nobody uses any more."""
        num_bytes = tensor.nbytes
        if not _MIN_KEPT_BYTES <= num_bytes <= _MAX_KEPT_BYTES:
            return
        with self._mutex:
            if self._kept_bytes + num_bytes > _MAX_KEPT_BYTES:
                # The sizes in use have changed, or there are too many to keep.
                self._free.clear()
                self._kept_bytes = 0
            self._free.setdefault(num_bytes, []).append(tensor.view(-1).view(torch.uint8))
            self._kept_bytes += num_bytes

    def take_rows(self, count: int, numel: int, like: torch.Tensor) -> Rows:
        """Return ``count`` contiguous rows of the dtype and on the device of ``like``."""
        small = self._small.get((count, numel, like.dtype))
        if small:
            with self._mutex:
                if small:
                    return small.pop()
        whole = self.take((count, numel), like)
        return Rows(whole, whole.unbind(0))

    def give_back_rows(self, given: Rows) -> None:
        """Take back what `take_rows` has given, once nobody uses it any more."""
        whole = given.whole
        if whole.nbytes >= _MIN_KEPT_BYTES:
            self.give_back(whole)
            return
        rows = given.rows
        key = (len(rows), rows[0].numel() if rows else 0, whole.dtype)
        with self._mutex:
            small = self._small.get(key)
            if small is None:
                if len(self._small) >= _MAX_SMALL_KINDS:
                    self._small.clear()
                small = self._small[key] = []
            if len(small) < _MAX_SMALL_EACH:
                small.append(given)
