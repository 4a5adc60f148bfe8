"""Quantising tensors block by block, and what it costs in passes over memory.

On a CPU a piece that fits in the cache is measured, scaled and encoded before the next is read: the
tensor is read once from memory and its codes are written once, in reused scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trainwright.precision.errors import PrecisionError

from .blocks import BlockQuantized, as_block, scales_shape, spread_scales
from .named import E8M0
from .number_format import NumberFormat, Specials
from .rounding import Rounding, nearest_even, toward_zero
from .scales import ExponentRule, is_amax, power_of_two_of, scale_from_amax

# Elements of a piece on a CPU: 1 MiB of float32, so that a cache holds it and its scaled values,
# and the calls on the few scales of a piece cost little beside those on its elements.
_CPU_PIECE = 1 << 18
_MX_BLOCK = (1, 32)
_Multipliers = Callable[[torch.Tensor], torch.Tensor]
# Shapes: B matrices, R rows, C columns of them; G and H rows and columns of blocks.


def quantize_blockwise(
    tensor: torch.Tensor,
    block: int | tuple[int, int],
    format: NumberFormat,
    *,
    power_of_two: bool = False,
    rounding: Rounding = nearest_even,
) -> BlockQuantized:
    """Return codes with a float32 scale for each block of the last two dims.

    The codes are those of ``tensor * scale_from_amax(amax of the block)``, clamped; the scale that
    is kept is the reciprocal. A zero block has the scale 1; one that holds NaN or infinity has the
    scale NaN and comes back as NaN. Blocks at the end of a dim may be smaller.

    Args:
        tensor: floating-point, at least one dim, none before the last two is cut.
        block: (rows, columns), such as (1, 128) for activations and (128, 128) for weights; a
            number counts columns.
        format: a signed one, of at most 8 bits.
        power_of_two: whether scales are powers of two, so that scaling does not round.
        rounding: as in `NumberFormat.encode`.

    Raises:
        PrecisionError: the tensor, block or format cannot be that.

    Source:
        DeepSeek-V3 technical report, section 3.3 (2024).
    """

    def multipliers(amax: torch.Tensor) -> torch.Tensor:
        return scale_from_amax(amax, format, power_of_two=power_of_two)

    pair = as_block(block)
    codes, found = _quantize(tensor, pair, format, multipliers, rounding)
    return BlockQuantized(codes, found.reciprocal_(), format, pair)


def quantize_mx(
    tensor: torch.Tensor,
    format: NumberFormat,
    rule: ExponentRule,
    *,
    rounding: Rounding = nearest_even,
) -> BlockQuantized:
    """Return codes with an E8M0 scale for each 32 elements of the last dim.

    Scales are ``2**rule(amax, format)``, from 2**-127, which a zero block has, to 2**127. What is
    above ``format.max`` times the scale, as the floor rule may leave it, becomes the largest
    number. A block that holds NaN or infinity, or from float64 a magnitude beyond the largest
    scale, has the scale NaN and comes back as NaN. The last block may be smaller.

    Args:
        tensor: floating-point, at least one dim.
        format: E4M3, E5M2, E3M2, E2M3, E2M1 or another signed one of at most 8 bits.
        rule: `floor_exponent` or `ceil_exponent`.
        rounding: as in `NumberFormat.encode`.

    Raises:
        PrecisionError: the tensor or format cannot be that.

    Source:
        OCP microscaling formats 1.0; NVIDIA's Blackwell rounds exponents up instead.
    """

    def multipliers(amax: torch.Tensor) -> torch.Tensor:
        exponent = rule(amax, format)
        lost = ~is_amax(amax) | (exponent > 127)
        scale = power_of_two_of(-exponent.clamp(-127, 127)).to(amax.dtype)
        return scale.masked_fill_(lost, torch.nan)

    codes, found = _quantize(tensor, _MX_BLOCK, format, multipliers, rounding)
    scales = E8M0.encode(found.reciprocal_())
    return BlockQuantized(codes, scales, format, _MX_BLOCK, E8M0)


def _quantize(
    tensor: torch.Tensor,
    block: tuple[int, int],
    format: NumberFormat,
    multipliers: _Multipliers,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, and what each block was multiplied by."""
    _check(tensor, format)
    whole_BRC = _as_matrices(tensor.detach(), block)
    codes_BRC = torch.empty(whole_BRC.shape, dtype=torch.uint8, device=tensor.device)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    grid = scales_shape(whole_BRC.shape, block)
    found_BGH = torch.empty(grid, dtype=wide, device=tensor.device)
    # Rounding by place sees the whole tensor at once, in float64: a product of two float32 numbers
    # that is rounded before it is drawn for would be biased.
    at_once = rounding not in (nearest_even, toward_zero)
    scratch = _Scratch(wide, tensor.device)
    for matrix, rows, cols in _pieces(whole_BRC, block):
        part_RC = whole_BRC[matrix, rows, cols]
        grid_rows = slice(rows.start // block[0], -(-rows.stop // block[0]))
        grid_cols = slice(cols.start // block[1], -(-cols.stop // block[1]))
        values_GRHC, amax_GH = scratch.measure(part_RC, block)
        scale_GH = multipliers(amax_GH)
        found_BGH[matrix, grid_rows, grid_cols] = scale_GH
        if not at_once:
            scaled_RC = scratch.scale(values_GRHC, scale_GH)[: part_RC.shape[0], : part_RC.shape[1]]
            _write_codes(scaled_RC, codes_BRC[matrix, rows, cols], format, rounding)
    if at_once and tensor.numel():
        spread_BRC = spread_scales(found_BGH.double(), block, whole_BRC.shape)
        scaled_BRC = whole_BRC.double().mul_(spread_BRC)
        codes_BRC = format.encode_clamped(scaled_BRC, rounding=rounding)
    return codes_BRC.view(tensor.shape), found_BGH.view(scales_shape(tensor.shape, block))


def _check(tensor: torch.Tensor, format: NumberFormat) -> None:
    if not tensor.dtype.is_floating_point or tensor.ndim == 0:
        raise PrecisionError(
            f"a tensor to quantise by blocks is floating-point with at least one dim, got "
            f"{tensor.dtype} of shape {list(tensor.shape)}"
        )
    if not format.signed or format.bits > 8:
        raise PrecisionError(
            f"blocks have codes of a signed format of at most 8 bits, got {format.name}"
        )


def _as_matrices(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
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


def _pieces(whole_BRC: torch.Tensor, block: tuple[int, int]) -> Iterator[tuple[int, slice, slice]]:
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


class _Scratch:
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


def _write_codes(
    scaled_RC: torch.Tensor, codes_RC: torch.Tensor, format: NumberFormat, rounding: Rounding
) -> None:
    """Write codes of scaled values, of the largest number for what is too large."""
    dtype = format.dtype if format.bits == 8 and rounding is nearest_even else None
    # PyTorch's casts go by way of float32, and would round float64 numbers twice.
    if dtype is None or scaled_RC.dtype is torch.float64:
        codes_RC.copy_(format.encode_clamped(scaled_RC, rounding=rounding))
        return
    if format.specials is not Specials.ALL_ONES or scaled_RC.device.type != "cpu":
        scaled_RC.clamp_(-format.max, format.max)
    codes_RC.view(dtype).copy_(scaled_RC)
