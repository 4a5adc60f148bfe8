"""From numbers to codes by integer arithmetic on bit patterns, so that rounding is exact.

The significand of a float32 or float64 number, an integer, loses as many low bits as the target has
fewer digits, more where the number lies below the target's normal ones. The carry of rounding up
runs on into the exponent field, as codes of one sign are in the order of their numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch

from trainwright.precision.errors import PrecisionError

from .rounding import Rounding, nearest_even

if TYPE_CHECKING:
    from .number_format import NumberFormat

# Bytes that are encoded together on a CPU: what a cache holds with its intermediate results.
_CPU_CHUNK_BYTES = 1 << 19
_DEVICE_CHUNK = 1 << 24


@attrs.frozen
class SpecialCodes:
    """Codes without sign of what is no finite number of the format.

    Args:
        too_large: of what rounds beyond the largest number, and of infinity.
        nan: of NaN; None where the format has none.
        negative_zero: whether zero and NaN have signs.
        magnitudes: whether an unsigned format takes values without their sign.
    """

    too_large: int
    nan: int | None
    negative_zero: bool = True
    magnitudes: bool = True


@attrs.frozen
class _Carrier:
    """A float format whose bits are worked on, as integers of the same width."""

    integer: torch.dtype
    mantissa_bits: int
    bias: int

    @property
    def infinity(self) -> int:
        return (2 * self.bias + 1) << self.mantissa_bits


_CARRIERS = {
    torch.float32: _Carrier(torch.int32, 23, 127),
    torch.float64: _Carrier(torch.int64, 52, 1023),
}


def encode_values(
    values: torch.Tensor, format: NumberFormat, rounding: Rounding, special: SpecialCodes
) -> torch.Tensor:
    """Return the codes of floating-point values of any shape, rounded once."""
    if not values.dtype.is_floating_point:
        raise PrecisionError(
            f"only floating-point values can be encoded in {format.name}, got {values.dtype}; "
            "convert them, or take torch.view_as_real of complex numbers"
        )
    flat = values.detach().reshape(-1)
    codes = torch.empty(flat.shape, dtype=code_dtype(format.bits), device=flat.device)
    wide = _carrying_dtype(values.dtype, format)
    on_cpu = flat.device.type == "cpu"
    chunk = _CPU_CHUNK_BYTES // wide.itemsize if on_cpu else _DEVICE_CHUNK
    for first in range(0, flat.numel(), chunk):
        part = flat[first : first + chunk].to(wide).contiguous()
        codes[first : first + chunk] = _encode_part(part, format, rounding, special, first)
    return codes.view(values.shape)


def code_dtype(bits: int) -> torch.dtype:
    """Return the integer dtype that holds codes of so many bits as non-negative numbers."""
    if bits <= 8:
        return torch.uint8
    return torch.int32 if bits <= 16 else torch.int64


def _carrying_dtype(dtype: torch.dtype, format: NumberFormat) -> torch.dtype:
    # float32 is not enough for formats whose normal numbers begin below those of float32.
    narrow = dtype is not torch.float64 and format.emin >= -126
    return torch.float32 if narrow else torch.float64


def _encode_part(
    values: torch.Tensor,
    format: NumberFormat,
    rounding: Rounding,
    special: SpecialCodes,
    first: int,
) -> torch.Tensor:
    carrier = _CARRIERS[values.dtype]
    raw = values.view(carrier.integer)
    magnitude = raw & torch.iinfo(carrier.integer).max
    code = _round_magnitude(magnitude, carrier, format, rounding, first)
    if special.too_large <= format.max_code + 1:
        code.clamp_max_(special.too_large)
    elif _may_exceed(code, format.max_code):
        code.masked_fill_(code > format.max_code, special.too_large)
    is_nan = magnitude > carrier.infinity if _may_exceed(magnitude, carrier.infinity) else None
    if is_nan is not None:
        code.masked_fill_(is_nan, special.nan or 0)
    if not format.signed:
        return code if special.magnitudes else code.masked_fill_(raw <= 0, special.too_large)
    if format.bits > 16:
        code, raw = code.long(), raw.long()
    sign = raw >> (torch.iinfo(carrier.integer).bits - format.bits)
    sign.bitwise_and_(1 << (format.bits - 1))
    if is_nan is not None and special.nan is None:
        sign.bitwise_xor_(is_nan.to(sign.dtype) << (format.bits - 1))
    if not special.negative_zero:
        sign.masked_fill_((code == 0) | (code > format.max_code), 0)
    return code.bitwise_or_(sign)


def _may_exceed(values: torch.Tensor, limit: int) -> bool:
    """Say whether a mask is needed: on a CPU a look is cheaper, elsewhere the host would wait."""
    return values.device.type != "cpu" or int(values.max()) > limit


def _round_magnitude(
    magnitude: torch.Tensor,
    carrier: _Carrier,
    format: NumberFormat,
    rounding: Rounding,
    first: int,
) -> torch.Tensor:
    """Return codes without sign, of infinity and NaN too large ones."""
    smallest = (format.emin + carrier.bias) << carrier.mantissa_bits
    if not format.signed:
        magnitude = magnitude.clamp_min(smallest)
    # Numbers below the carrier's normal ones have the exponent of these, and no implicit bit.
    exponent = (magnitude >> carrier.mantissa_bits).clamp_min_(1)
    significand = magnitude - ((exponent - 1) << carrier.mantissa_bits)
    above = exponent.sub_(carrier.bias + format.emin)
    shift = (carrier.mantissa_bits - format.mantissa_bits) - above.clamp_max(0)
    rounded = rounding(significand, shift, first)
    code = rounded + (above.clamp_min_(0) << format.mantissa_bits)
    if format.signed:
        return code
    # Without zero, the smallest number has the code 0.
    code.sub_(1 << format.mantissa_bits)
    if rounding is nearest_even:
        # PyTorch and ml_dtypes take what is above the smallest number, however little, to the next.
        code.masked_fill_((code == 0) & (magnitude > smallest), 1)
    return code
