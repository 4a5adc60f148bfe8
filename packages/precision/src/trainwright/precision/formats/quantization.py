"""Quantising tensors, block by block or by a given scale.

On a CPU a piece that fits in the cache is measured, scaled and encoded before the next is read: the
tensor is read once from memory and its codes are written once, in reused scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.precision.errors import PrecisionError

from .blocks import BlockQuantized, as_block, scales_shape, spread_scales
from .named import E8M0
from .number_format import NumberFormat, Specials
from .pieces import Scratch, as_matrices, cut_pieces
from .rounding import Rounding, nearest_even, toward_zero
from .scales import ExponentRule, is_amax, power_of_two_of, scale_from_amax

_MX_BLOCK = (1, 32)
# From the largest magnitude of each block to what its values are multiplied by.
Multipliers = Callable[[torch.Tensor], torch.Tensor]
# Roundings that look at no place, so that pieces may come in any order.
_PLACELESS = (nearest_even, toward_zero)
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
    codes, found = encode_blocks(tensor, pair, format, multipliers, rounding)
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

    codes, found = encode_blocks(tensor, _MX_BLOCK, format, multipliers, rounding)
    scales = E8M0.encode(found.reciprocal_())
    return BlockQuantized(codes, scales, format, _MX_BLOCK, E8M0)


def encode_scaled(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    format: NumberFormat,
    *,
    rounding: Rounding = nearest_even,
) -> torch.Tensor:
    """Return the codes of ``tensor * scale``, of the largest number for what is too large.

    For scales that are known before the tensor is, as with delayed scaling. Infinity becomes the
    largest number too, and NaN a zero where the format has none: look for both before.

    Args:
        tensor: floating-point, at least one dim.
        scale: as of `scale_from_amax`, float32 or float64: one number, or one for each row,
            [..., 1].
        format: a signed one, of at most 8 bits.
        rounding: as in `NumberFormat.encode`.

    Returns:
        uint8 codes of the shape of ``tensor``.

    Raises:
        PrecisionError: tensor, scale or format cannot be that.
    """
    _check(tensor, format)
    if scale.numel() != 1 and scale.shape != (*tensor.shape[:-1], 1):
        raise PrecisionError(
            f"a scale is one number, or one for each row of {list(tensor.shape)}, got shape "
            f"{list(scale.shape)}"
        )
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=torch.uint8, device=tensor.device)
    if rounding not in _PLACELESS:
        spread = scale.view(()) if scale.numel() == 1 else scale
        return format.encode_clamped(tensor.detach().double() * spread.double(), rounding=rounding)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    cols = tensor.shape[-1] if scale.numel() > 1 else tensor.numel()
    whole_RC = tensor.detach().reshape(-1, cols)
    scale_R1 = scale.to(wide).reshape(-1, 1).expand(whole_RC.shape[0], 1)
    codes_RC = torch.empty(whole_RC.shape, dtype=torch.uint8, device=tensor.device)
    scratch = Scratch(wide, tensor.device)
    for _, rows, columns in cut_pieces(whole_RC[None], (1, 1)):
        scaled_RC = scratch.copy(whole_RC[rows, columns]).mul_(scale_R1[rows])
        _write_codes(scaled_RC, codes_RC[rows, columns], format, rounding)
    return codes_RC.view(tensor.shape)


def encode_blocks(
    tensor: torch.Tensor,
    block: tuple[int, int],
    format: NumberFormat,
    multipliers: Multipliers,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, and what each block was multiplied by."""
    _check(tensor, format)
    whole_BRC = as_matrices(tensor.detach(), block)
    codes_BRC = torch.empty(whole_BRC.shape, dtype=torch.uint8, device=tensor.device)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    grid = scales_shape(whole_BRC.shape, block)
    found_BGH = torch.empty(grid, dtype=wide, device=tensor.device)
    # Rounding by place sees the whole tensor at once, in float64: a product of two float32 numbers
    # that is rounded before it is drawn for would be biased.
    at_once = rounding not in _PLACELESS
    scratch = Scratch(wide, tensor.device)
    for matrix, rows, cols in cut_pieces(whole_BRC, block):
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
            f"a tensor to quantise is floating-point with at least one dim, got {tensor.dtype} of "
            f"shape {list(tensor.shape)}"
        )
    if not format.signed or format.bits > 8:
        raise PrecisionError(
            f"blocks have codes of a signed format of at most 8 bits, got {format.name}"
        )


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
