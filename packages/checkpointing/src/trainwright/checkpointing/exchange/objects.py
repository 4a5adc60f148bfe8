"""Values with tensors in them: the tensors are put where their descriptions stand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpointing.errors import UntrustedError
from trainwright.collectives import Box

from .archive import Archive
from .saved_tensor import SavedTensor

_MAX_DEPTH = 100


def check_plain(value: Any, source: Path | str, num_bytes: int) -> None:
    """Raise unless ``value`` is a tree of sensible depth and size.

    Shared containers let a pickle of a few bytes describe a tree of 2**100 leaves, or a list that
    holds itself: whoever walks over such a value would never come back.

    Raises:
        UntrustedError: It is not.
    """
    open_values: list[tuple[Any, int]] = [(value, 0)]
    left = 4 * num_bytes + 1000
    while open_values:
        item, depth = open_values.pop()
        left -= 1
        if left < 0 or depth > _MAX_DEPTH:
            raise UntrustedError(
                f"{source}: its values are nested more than {_MAX_DEPTH} deep, or repeat each "
                f"other to more than {4 * num_bytes + 1000} of them: refused"
            )
        if isinstance(item, dict):
            open_values += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple, set, frozenset)):
            left -= len(item) // 8  # what is about to be put on the stack counts, too
            open_values += [(part, depth + 1) for part in item] if left >= 0 else []


def read_object(archive: Archive) -> Any:
    """Return the value that an archive holds, with every tensor read.

    Raises:
        DamagedCheckpointError: A storage is not what was written.
        UntrustedError: It is not made of plain values and tensors, or of endless ones.
    """
    value = archive.read_value()
    check_plain(value, archive.source, archive.length)
    return _Filler(archive).fill(value)


class _Filler:
    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._left = archive.length
        self._done: dict[int, Any] = {}  # a container under two names stays one container

    def fill(self, value: Any) -> Any:
        if not isinstance(value, (dict, list, tuple, SavedTensor)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._fill_new(value)
        return self._done[id(value)]

    def _fill_new(self, value: Any) -> Any:
        if isinstance(value, SavedTensor):
            return self._tensor(value)
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        return type(value)(self.fill(item) for item in value)

    def _tensor(self, saved: SavedTensor) -> torch.Tensor:
        where = self._archive.strided(saved)
        self._left -= math.prod(saved.shape) * saved.dtype.itemsize
        if self._left < 0:
            raise UntrustedError(
                f"{where.source}: tensors that are together larger than the file: refused"
            )
        self._archive.verify(f"data/{saved.storage.key}")
        into = torch.empty(saved.shape, dtype=saved.dtype)
        where.copy(Box.full(saved.shape), into)
        return into
