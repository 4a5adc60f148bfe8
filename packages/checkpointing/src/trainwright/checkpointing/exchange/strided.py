"""Boxes of a tensor that lies in a file, copied without reading what is far from them."""

from __future__ import annotations

import math

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.collectives import Box

from .readers import Bytes, read_exactly

_READ_BYTES = 1 << 22  # the most memory that one read takes
_PAGE_BYTES = 1 << 12  # what a disk reads at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@attrs.frozen
class Strided:
    """A tensor's elements in a file.

    Args:
        reader: The file.
        begin: Where its first element lies.
        dtype: Its dtype.
        shape: Its shape.
        stride: Elements from one index to the next, in each dim.
        source: What it is, for messages.
        is_conj: Whether the complex conjugate of what is stored is meant.
        is_neg: Whether the negative of what is stored is meant.
    """

    reader: Bytes
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    source: str
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def packed(
        cls, reader: Bytes, begin: int, dtype: torch.dtype, shape: tuple[int, ...], source: str
    ) -> Strided:
        """Return a row-major tensor without gaps."""
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(reader, begin, dtype, shape, stride, source)

    def copy(self, box: Box, into: torch.Tensor) -> None:
        """Copy the elements of ``box`` to ``into``, a tensor of the box's shape.

        Extra memory: 4 MiB.

        Raises:
            DamagedCheckpointError: They are not in the file.
        """
        if box.numel == 0:
            return
        last = sum((n - 1) * s for n, s in zip(box.shape, self.stride, strict=True))
        span = (last + 1) * self.dtype.itemsize
        wanted = box.numel * self.dtype.itemsize
        is_dense = span - wanted <= max(_PAGE_BYTES, wanted // 8)  # small gaps are read along
        if box.numel == 1 or (is_dense and span <= _READ_BYTES):
            self._copy_span(box, span, into)
            return
        lengths = [n * s if n > 1 else -1 for n, s in zip(box.shape, self.stride, strict=True)]
        dim = lengths.index(max(lengths))
        half = box.shape[dim] // 2
        middle = box.start[dim] + half
        first_stop = (*box.stop[:dim], middle, *box.stop[dim + 1 :])
        second_start = (*box.start[:dim], middle, *box.start[dim + 1 :])
        self.copy(Box(box.start, first_stop), into.narrow(dim, 0, half))
        self.copy(Box(second_start, box.stop), into.narrow(dim, half, box.shape[dim] - half))

    def _copy_span(self, box: Box, span: int, into: torch.Tensor) -> None:
        first = sum(i * s for i, s in zip(box.start, self.stride, strict=True))
        begin = self.begin + first * self.dtype.itemsize
        found = torch.frombuffer(
            read_exactly(self.reader, begin, span, self.source), dtype=torch.uint8
        )
        if self.is_conj or self.is_neg or into.dtype != self.dtype:
            values = found.view(self.dtype).as_strided(box.shape, self.stride)
            values = values.conj() if self.is_conj else values
            into.copy_(values._neg_view() if self.is_neg else values)
            return
        bits = _BITS.get(self.dtype.itemsize)
        if bits is None:
            raise DamagedCheckpointError(f"{self.source} has elements of {self.dtype}")
        # As integers: every bit comes over, also of NaNs and of dtypes that cannot be computed in.
        into.view(bits).copy_(found.view(bits).as_strided(box.shape, self.stride))
