"""Tensors in pieces that a cache holds, and memory that is used again for each."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Elements of a piece on a CPU: 1 MiB of float32, so that a cache holds it and its scaled values,
# and the calls on the few scales of a piece cost little beside those on its elements.
_CPU_PIECE = 1 << 18
# Shapes: B matrices, R rows, C columns of them; G and H rows and columns of blocks.


def as_matrices(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return a view, or a copy where there is none, [B, R, C] with the same blocks."""
    if tensor.ndim == 1:
        return tensor.view(1, 1, -1)
    rows, cols = tensor.shape[-2:]
    if tensor.numel() == 0:
        return tensor.new_empty((0, rows, cols))
    if block[0] > 1:
        return tensor.reshape(-1, rows, cols)
    # Where no row ends within a block, all rows are one.
    flat = cols % block[1] == 0 and tensor.is_contiguous()
    return tensor.view(1, 1, -1) if flat else tensor.reshape(1, -1, cols)


def cut_pieces(
    whole_BRC: torch.Tensor, block: tuple[int, int]
) -> Iterator[tuple[int, slice, slice]]:
    """Yield matrix, rows and columns of pieces of whole blocks: on a CPU what a cache holds."""
    num, rows, cols = whole_BRC.shape
    most = _CPU_PIECE if whole_BRC.device.type == "cpu" else whole_BRC.numel()
    row_step = max(1, most // max(1, cols) // block[0]) * block[0]
    col_step = max(1, most // min(row_step, max(1, rows)) // block[1]) * block[1]
    for matrix in range(num):
        for row in range(0, rows, row_step):
            for col in range(0, cols, col_step):
                last = slice(col, min(col + col_step, cols))
                yield matrix, slice(row, min(row + row_step, rows)), last


class Scratch:
    """Two pieces of memory that are used again for every piece."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._values = torch.empty(0, dtype=dtype, device=device)
        self._work = torch.empty(0, dtype=dtype, device=device)

    def measure(
        self, part_RC: torch.Tensor, block: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values by blocks, zeros behind their last, and the largest magnitudes."""
        rows, cols = part_RC.shape
        full = -(-rows // block[0]) * block[0], -(-cols // block[1]) * block[1]
        self._work = _at_least(self._work, full)
        work_RC = _first(self._work, full)
        values_RC = part_RC
        if part_RC.dtype is not self._values.dtype or (rows, cols) != full:
            self._values = _at_least(self._values, full)
            values_RC = _first(self._values, full)
            if (rows, cols) != full:
                values_RC.zero_()
            values_RC[:rows, :cols].copy_(part_RC)
        torch.abs(values_RC, out=work_RC)
        groups, blocks = full[0] // block[0], full[1] // block[1]
        amax_RH = work_RC.view(full[0], blocks, block[1]).amax(2)
        amax_GH = amax_RH if block[0] == 1 else amax_RH.view(groups, block[0], blocks).amax(1)
        return values_RC.view(groups, block[0], blocks, block[1]), amax_GH

    def copy(self, part_RC: torch.Tensor) -> torch.Tensor:
        """Return the values, for the caller to change."""
        rows, cols = part_RC.shape
        self._work = _at_least(self._work, (rows, cols))
        return _first(self._work, (rows, cols)).copy_(part_RC)

    def scale(self, values_GRHC: torch.Tensor, scale_GH: torch.Tensor) -> torch.Tensor:
        """Return rows of scaled values."""
        groups, rows, blocks, cols = values_GRHC.shape
        work_RC = _first(self._work, (groups * rows, blocks * cols))
        work_GRHC = work_RC.view(values_GRHC.shape)
        torch.mul(values_GRHC, scale_GH[:, None, :, None], out=work_GRHC)
        return work_RC


def _at_least(memory: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    numel = shape[0] * shape[1]
    return memory if memory.numel() >= numel else memory.new_empty(numel)


def _first(memory: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return memory[: shape[0] * shape[1]].view(shape)
