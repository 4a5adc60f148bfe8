"""Tensors as codes and a scale for each block of their last two dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from trainwright.precision.errors import PrecisionError

from .named import FP32
from .number_format import NumberFormat


def as_block(block: int | tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a block; a number alone counts columns."""
    pair = (1, block) if isinstance(block, int) else tuple(block)
    if len(pair) != 2 or not all(type(size) is int and size > 0 for size in pair):
        raise PrecisionError(
            f"a block is a number of elements of the last dim, or (rows, columns), at least 1: "
            f"got {block!r}; (1, 128), (128, 128) and 32 are usual"
        )
    return pair[0], pair[1]


@attrs.frozen(eq=False)
class BlockQuantized:
    """Codes and, for each block, what their numbers are multiplied by.

    Args:
        codes: of the tensor's shape [..., rows, columns].
        scales: [..., ceil(rows / block[0]), ceil(columns / block[1])], the last blocks may be
            smaller; float32 (float64 of a float64 tensor), or codes of ``scale_format``. NaN where
            a block held something that is not finite.
        format: of the codes.
        block: rows and columns that share a scale; of a tensor with one dim, the rows count 1.
        scale_format: `FP32` where the scales are numbers, else the format of their codes.
        tensor_scale: what all scales are multiplied by besides, one number; None: nothing.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: NumberFormat
    block: tuple[int, int] = attrs.field(converter=as_block)
    scale_format: NumberFormat = FP32
    tensor_scale: torch.Tensor | None = None

    @property
    def bits_per_element(self) -> float:
        """Bits of a code and of its part of a whole block's scale, without `tensor_scale`."""
        scale_bits = 8 * self.scales.dtype.itemsize
        return self.format.bits + scale_bits / math.prod(self.block)

    def scale_values(self) -> torch.Tensor:
        """Return the scales as numbers, float32 or float64."""
        scales = self.scales
        if self.scale_format is not FP32:
            scales = self.scale_format.decode(scales)
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return code points times scales; a block whose scale is NaN is NaN throughout.

        Args:
            dtype: of the result; products are rounded to it, and what rounds beyond its largest
                number becomes that.
        """
        scales = self.scale_values()
        wide = torch.float64 if torch.float64 in (dtype, scales.dtype) else torch.float32
        num, rows, cols = _matrices_shape(self.codes.shape)
        height, width = self.block
        numbers = self.format.decode(self.codes, dtype=wide)
        if rows % height or cols % width:
            spread = spread_scales(scales.to(wide), self.block, (num, rows, cols))
            numbers.view(num, rows, cols).mul_(spread)
        else:
            grid = scales.to(wide).view(num, rows // height, 1, cols // width, 1)
            numbers.view(num, rows // height, height, cols // width, width).mul_(grid)
        limit = torch.finfo(dtype).max
        return numbers.clamp_(-limit, limit).to(dtype)


def spread_scales(
    scales: torch.Tensor, block: tuple[int, int], matrices: Sequence[int]
) -> torch.Tensor:
    """Return the scale of each element of matrices of a shape, where it need not be one."""
    num, rows, cols = matrices
    grid = scales.reshape(num, -(-rows // block[0]), -(-cols // block[1]))
    grid = grid.repeat_interleave(block[1], 2)[..., :cols] if block[1] > 1 else grid
    return grid.repeat_interleave(block[0], 1)[:, :rows] if block[0] > 1 else grid


def scales_shape(shape: torch.Size, block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of at least one dim."""
    last = -(-shape[-1] // block[1])
    if len(shape) == 1:
        return (last,)
    return (*shape[:-2], -(-shape[-2] // block[0]), last)


def _matrices_shape(shape: torch.Size) -> tuple[int, int, int]:
    rows, cols = (1, shape[0]) if len(shape) == 1 else (shape[-2], shape[-1])
    return math.prod(shape[:-2]), rows, cols
