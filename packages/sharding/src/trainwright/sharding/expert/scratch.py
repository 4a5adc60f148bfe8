"""Memory for rows on their way: on the CPU fresh memory costs as much as the transfer."""

from __future__ import annotations

import torch


class Scratch:
    """Hands out one buffer of a dtype again and again; it grows to the largest asked for.

    What `take` has returned is overwritten after the next `take`, so it is used up before: rows are
    written, sent and waited for, or received and summed. An accelerator's allocator keeps memory
    itself; there each buffer is fresh.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def take(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, D] of the dtype and on the device of ``like`` [any, D]."""
        shape = (num_rows, like.shape[1])
        if like.device.type != "cpu":
            return like.new_empty(shape)
        numel = shape[0] * shape[1]
        kept = self._kept.get(like.dtype)
        if kept is None or kept.numel() < numel:
            kept = self._kept[like.dtype] = torch.empty(numel, dtype=like.dtype)
        return kept[:numel].view(shape)
