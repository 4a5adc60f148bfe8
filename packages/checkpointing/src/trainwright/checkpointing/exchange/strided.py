"""Boxes of a tensor that lies in a file, copied without reading what is far from them."""

from __future__ import annotations

import math

import attrs
import torch

from trainwright.checkpointing.errors import DamagedCheckpointError
from trainwright.collectives import Box

from .readers import Bytes, read_rows

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
        size = self.dtype.itemsize
        reaches = [(n - 1) * s for n, s in zip(box.shape, self.stride, strict=True)]
        span = (sum(reaches) + 1) * size
        is_dense = _is_dense(span, box.numel * size)
        if is_dense and span <= _READ_BYTES:
            self._copy_rows(box, 0, 1, span, into)
            return
        # The dim whose indices lie farthest apart: within one of them the rest is closer together.
        dim = max(range(len(reaches)), key=lambda dim: (box.shape[dim] > 1, self.stride[dim]))
        row = span - reaches[dim] * size
        half = (box.shape[dim] + 1) // 2  # strides may overlap: so it ends in any case
        count = 1
        if is_dense:
            count = max(1, min(_READ_BYTES // max(self.stride[dim] * size, 1), half))
        elif row <= _READ_BYTES and _is_dense(row, box.numel // box.shape[dim] * size):
            count = max(1, _READ_BYTES // row)
        for at in range(0, box.shape[dim], count):
            part = _narrow(box, dim, at, count)
            target = into.narrow(dim, at, part.shape[dim])
            if is_dense or count == 1:
                self.copy(part, target)
            else:
                self._copy_rows(part, dim, part.shape[dim], row, target)

    def _copy_rows(self, box: Box, dim: int, num_rows: int, row: int, into: torch.Tensor) -> None:
        """Copy a box of which ``num_rows`` indices of ``dim``, ``row`` bytes each, are read."""
        size = self.dtype.itemsize
        first = sum(i * s for i, s in zip(box.start, self.stride, strict=True))
        begin = self.begin + first * size
        stride = list(self.stride)
        step = stride[dim] * size if num_rows > 1 else 0
        found = torch.frombuffer(
            read_rows(self.reader, (begin, step, num_rows), row, self.source), dtype=torch.uint8
        )
        if num_rows > 1:
            stride[dim] = row // size
        if self.is_conj or self.is_neg or into.dtype != self.dtype:
            values = found.view(self.dtype).as_strided(box.shape, stride)
            values = values.conj() if self.is_conj else values
            into.copy_(values._neg_view() if self.is_neg else values)
            return
        bits = _BITS.get(size)
        if bits is None:
            raise DamagedCheckpointError(f"{self.source} has elements of {self.dtype}")
        # As integers: every bit comes over, also of NaNs and of dtypes that cannot be computed in.
        into.view(bits).copy_(found.view(bits).as_strided(box.shape, stride))


def _is_dense(span: int, wanted: int) -> bool:
    """Whether to read along what lies between: a page, or an eighth of what is wanted."""
    return span - wanted <= max(_PAGE_BYTES, wanted // 8)


def _narrow(box: Box, dim: int, at: int, count: int) -> Box:
    start, stop = list(box.start), list(box.stop)
    start[dim] = box.start[dim] + at
    stop[dim] = min(start[dim] + count, box.stop[dim])
    return Box(start, stop)
