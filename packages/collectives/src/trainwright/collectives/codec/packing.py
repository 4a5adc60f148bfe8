"""Several tensors as one row of bytes, so that what was encoded travels as one message."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives.errors import UsageError

# Every dtype can be viewed at such a place of a row, and rows can follow each other.
_ALIGNMENT = 16


@attrs.frozen
class Packing:
    """Where tensors of known shapes and dtypes stand in a row of bytes.

    Args:
        shapes: The shape of each tensor.
        dtypes: The dtype of each tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor]) -> Packing:
        """Return the packing of tensors like these."""
        return cls(tuple(tuple(part.shape) for part in parts), tuple(part.dtype for part in parts))

    @property
    def num_bytes(self) -> int:
        """The length of a row: the bytes of the tensors, each rounded up to a multiple of 16."""
        return self._starts()[-1]

    def pack(self, parts: Sequence[torch.Tensor], row: torch.Tensor) -> None:
        """Write the tensors into ``row``: uint8 [num_bytes], contiguous.

        Raises:
            UsageError: They are not like those that the packing was made of.
        """
        if Packing.of(parts) != self:
            raise UsageError(
                f"encoded parts of one shape and dtype must be alike, got {Packing.of(parts)} "
                f"after {self}; the codec must not let them depend on the values"
            )
        for part, (start, stop) in zip(parts, itertools.pairwise(self._starts()), strict=True):
            flat = part.contiguous().view(-1).view(torch.uint8)
            row[start : start + flat.numel()].copy_(flat)
            row[start + flat.numel() : stop].zero_()

    def unpack(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors as views of ``row``."""
        return tuple(
            _view(row[start:stop], shape, dtype)
            for (start, stop), shape, dtype in zip(
                itertools.pairwise(self._starts()), self.shapes, self.dtypes, strict=True
            )
        )

    def _starts(self) -> tuple[int, ...]:
        lengths = (
            -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return tuple(itertools.accumulate(lengths, initial=0))


def _view(slot: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if not slot.numel():  # rows without bytes may begin anywhere
        return slot.new_empty(shape, dtype=dtype)
    return slot[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
