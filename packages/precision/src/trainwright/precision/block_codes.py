"""Between float32 values and eight bits in blocks, rounded by draws.

A format's numbers below its normal ones have the spacing of the first exponent, as those of float32
have. Where values are multiplied so that both kinds of normal numbers begin together, the exponent
field of float32 is that of the format, and a code is a shift of bits. That wants a processor that
computes with subnormal numbers, and scales that leave room for the factor; elsewhere, and on other
devices, the first exponent is treated by itself. Both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch

from trainwright.precision.formats import NumberFormat, scale_from_amax

_PIECE = 1 << 16
_MANTISSA_BITS = 23
_BIAS = 127
_SMALLEST = 2.0**-149
_LARGEST = 2.0**127
# Ranges of elements that begin at a block, and their draws: int32, 0 to 2**16 - 1.
Draws = Iterable[tuple[slice, torch.Tensor]]


def measure_blocks(values: torch.Tensor, block: int) -> tuple[torch.Tensor, bool]:
    """Return the largest magnitude of each block, and whether there is no negative value.

    Args:
        values: float32, of one dim; the last block may be smaller.
        block: elements that share a scale.
    """
    whole = values.numel() // block * block
    rows = values[:whole].view(-1, block)
    parts = [(rows.amin(1), rows.amax(1))] if whole else []
    if whole < values.numel():
        tail = values[whole:]
        parts.append((tail.amin().view(1), tail.amax().view(1)))
    if not parts:
        return values.new_empty(0), False
    low, high = (torch.cat(column) for column in zip(*parts, strict=True))
    return torch.maximum(high, -low), bool(low.amin() >= 0)


def encode_blocks(
    values: torch.Tensor, amax: torch.Tensor, draws: Draws, format: NumberFormat, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, and for each block what they are multiplied by: a power of two, or NaN.

    An element is rounded up where its dropped bits and its draw carry.

    Args:
        values: float32, of one dim.
        amax: of each block.
        draws: for all elements.
        format: of eight bits; or of nine where no value is negative: the sign is then not kept,
            and what is positive is never zero.
        block: elements that share a scale.
    """
    multipliers = scale_from_amax(amax, format, power_of_two=True)
    factor = 2.0 ** (1 - _BIAS - format.emin)
    shifts = values.numel() > 0 and _computes_subnormals(values)
    shifts = shifts and float(multipliers.amin()) * factor >= _SMALLEST
    wanted = multipliers * factor if shifts else multipliers
    dropped = _MANTISSA_BITS - format.mantissa_bits
    shift = torch.tensor(dropped, dtype=torch.int32, device=values.device)
    codes = torch.empty_like(values, dtype=torch.uint8)
    scratch = values.new_empty(min(_PIECE, values.numel()))
    for where, drawn in draws:
        part = values[where]
        scaled = scratch[: part.numel()]
        _times_blocks(part, wanted[where.start // block :], block, scaled)
        bits = scaled.view(torch.int32)
        if shifts:
            # Draws carry into the magnitude whatever the sign is, which is cut off with the rest.
            bits.add_(drawn, alpha=1 << (dropped - 16))
            torch.bitwise_right_shift(bits, shift, out=bits)
        else:
            _round_by_exponents(scaled.abs_(), drawn, format)
        found = codes[where].copy_(bits)
        if format.bits == 8:
            found.add_(_negative(part), alpha=1 << 7)
        else:
            torch.maximum(found, positive(part), out=found)
    return codes, multipliers.reciprocal_()


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, format: NumberFormat, block: int, out: torch.Tensor
) -> None:
    """Write code points times scales.

    Args:
        codes: uint8, of one dim.
        scales: one for each block of them.
        format: as in `encode_blocks`.
        block: elements that share a scale.
        out: float32, of one dim and contiguous.
    """
    factor = 2.0 ** (format.emin + _BIAS - 1)
    shifts = codes.numel() > 0 and _computes_subnormals(codes)
    shifts = shifts and float(scales.amax()) * factor <= _LARGEST
    wanted = scales * factor if shifts else scales
    dropped = _MANTISSA_BITS - format.mantissa_bits
    magnitude = (1 << (format.exponent_bits + format.mantissa_bits)) - 1
    # As tensors: with numbers the operations make a copy first.
    shift = torch.tensor(dropped, dtype=torch.int32, device=codes.device)
    mask = torch.tensor(-(1 << 31) | magnitude << dropped, dtype=torch.int32, device=codes.device)
    for first in range(0, codes.numel(), _PIECE):
        part, found = out[first : first + _PIECE], codes[first : first + _PIECE]
        if not shifts:
            torch.index_select(_numbers(format, out.device), 0, found.int(), out=part)
        elif format.bits == 8:
            bits = part.view(torch.int32).copy_(found.view(torch.int8))
            # The sign was spread over all bits above the code.
            torch.bitwise_left_shift(bits, shift, out=bits)
            torch.bitwise_and(bits, mask, out=bits)
        else:
            bits = part.view(torch.int32).copy_(found)
            torch.bitwise_left_shift(bits, shift, out=bits)
        _times_blocks(part, wanted[first // block :], block, part)


def positive(values: torch.Tensor) -> torch.Tensor:
    """Return 1 where a value is positive, else 0, in bytes."""
    if values.device.type != "cpu":
        return (values > 0).view(torch.uint8)
    # Some times as fast as torch's, which fills bools one by one.
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(values.numpy() > 0).view(torch.uint8)


def _negative(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cpu":
        return (values < 0).view(torch.uint8)
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(values.numpy() < 0).view(torch.uint8)


def _computes_subnormals(like: torch.Tensor) -> bool:
    """Say whether there are subnormal numbers; on devices, where a look would wait, do not ask."""
    if like.device.type != "cpu":
        return False
    return float(torch.tensor(2.0**-126, dtype=torch.float32) * 0.5) > 0.0


def _times_blocks(
    values: torch.Tensor, scales: torch.Tensor, block: int, out: torch.Tensor
) -> None:
    num = values.numel() // block
    whole = num * block
    rows, target = values[:whole].view(num, block), out[:whole].view(num, block)
    torch.mul(rows, scales[:num, None], out=target)
    if whole < values.numel():
        torch.mul(values[whole:], scales[num], out=out[whole:])


def _round_by_exponents(scaled: torch.Tensor, draws: torch.Tensor, format: NumberFormat) -> None:
    """Replace magnitudes by the bits of their codes."""
    # Below its normal numbers a format has the spacing of the first exponent; as float32 has it
    # one exponent long, so with the first normal number added.
    small = scaled < format.min_normal
    scaled.add_(small, alpha=format.min_normal)
    dropped = _MANTISSA_BITS - format.mantissa_bits
    bits = scaled.view(torch.int32)
    bits.add_(draws, alpha=1 << (dropped - 16)).bitwise_right_shift_(dropped)
    bits.sub_((_BIAS - format.bias) << format.mantissa_bits)
    bits.add_(small, alpha=-1 << format.mantissa_bits).clamp_(0, format.max_code)


@lru_cache(16)
def _numbers(format: NumberFormat, device: torch.device) -> torch.Tensor:
    """Return the numbers of the codes that a byte holds."""
    with torch.inference_mode(False):
        return format.code_points(dtype=torch.float32)[:256].to(device)
