"""Host memory for the few units that are read, updated or written at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.sharding.offload.ledger import Ledger

_ALIGNMENT = 64


class Buffers:
    """Memory in pieces of one size, counted and used again.

    Args:
        num_bytes: Of each.
        ledger: Counts them.
    """

    def __init__(self, num_bytes: int, ledger: Ledger) -> None:
        self._num_bytes = num_bytes
        self._ledger = ledger
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Return one that nobody uses, as bytes."""
        if self._free:
            return self._free.pop()
        self._ledger.take(self._num_bytes)
        return torch.empty(self._num_bytes, dtype=torch.uint8)

    def give(self, memory: torch.Tensor) -> None:
        """Let others use it."""
        self._free.append(memory)

    def drop(self) -> None:
        """Forget one that was taken: somebody may still read or write it."""
        self._ledger.give(self._num_bytes)


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Return how much memory parts of these sizes take, each aligned."""
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def cut(memory: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return parts of these sizes from the beginning of memory, each aligned."""
    found, at = [], 0
    for size in sizes:
        found.append(memory[at : at + size])
        at += buffer_bytes([size])
    return found
