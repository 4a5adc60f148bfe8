"""From codes to numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from trainwright.precision.errors import PrecisionError

from .packing import pack_codes

if TYPE_CHECKING:
    from .number_format import NumberFormat

_TABLE_BITS = 8
# Codes that are looked up together on a CPU: what a cache holds with their numbers.
_CPU_CHUNK = 1 << 17
_FLOAT64_MANTISSA_BITS = 52
_FLOAT64_BIAS = 1023


def decode_codes(codes: torch.Tensor, format: NumberFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of integer codes of any shape, in float32 or float64."""
    _check(codes, format, dtype)
    if format.bits <= _TABLE_BITS:
        # What is computed of a stand-in for a tensor is a stand-in itself: not to be kept.
        make = _table if type(codes) is torch.Tensor else _table.__wrapped__
        return _look_up(codes.reshape(-1), make(format, dtype, codes.device)).view(codes.shape)
    if format.dtype is not None:
        return pack_codes(codes, format.name, format.bits, format.dtype).to(dtype)
    return _compute(codes.long(), format).to(dtype)


def _check(codes: torch.Tensor, format: NumberFormat, dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise PrecisionError(f"codes are decoded to float32 or float64, got {dtype}; cast then")
    if codes.dtype.is_floating_point or codes.dtype.is_complex or codes.dtype is torch.bool:
        raise PrecisionError(
            f"codes of {format.name} must be integers, got {codes.dtype}; take codes_of() of a "
            "tensor of its dtype"
        )
    held = torch.iinfo(codes.dtype)
    if codes.numel() == 0 or (held.min == 0 and held.max < 1 << format.bits):
        return
    low, high = torch.aminmax(codes)
    if int(low) < 0 or int(high) >= 1 << format.bits:
        raise PrecisionError(
            f"codes of {format.name} go from 0 to {(1 << format.bits) - 1}, got {int(low)} to "
            f"{int(high)}"
        )


@lru_cache(64)
def _table(format: NumberFormat, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the number of every code, for reading only."""
    # A table made in inference mode would be refused to autograd later.
    with torch.inference_mode(False), torch.no_grad():
        every = torch.arange(1 << format.bits, device=device)
        return _compute(every, format).to(dtype)


def _look_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    numbers = torch.empty(codes.shape, dtype=table.dtype, device=codes.device)
    chunk = _CPU_CHUNK if codes.device.type == "cpu" else max(1, codes.numel())
    for first in range(0, codes.numel(), chunk):
        part = slice(first, first + chunk)
        torch.index_select(table, 0, codes[part].int(), out=numbers[part])
    return numbers


def _compute(codes: torch.Tensor, format: NumberFormat) -> torch.Tensor:
    """Return float64 numbers from the fields of int64 codes."""
    mantissa_bits = format.mantissa_bits
    sign_bit = 1 << (format.exponent_bits + mantissa_bits)
    magnitude = codes & (sign_bit - 1)
    field = magnitude >> mantissa_bits
    # The exponent field 0 holds numbers without implicit bit at the exponent of field 1.
    normal = field > 0 if format.signed else torch.ones_like(field, dtype=torch.bool)
    significand = (magnitude & ((1 << mantissa_bits) - 1)) + (normal.long() << mantissa_bits)
    exponent = field.clamp_min(1) if format.signed else field
    unit = (exponent - format.bias - mantissa_bits + _FLOAT64_BIAS) << _FLOAT64_MANTISSA_BITS
    values = significand.double() * unit.view(torch.float64)
    if format.has_infinity:
        values.masked_fill_(magnitude == format.max_code + 1, torch.inf)
    values.masked_fill_(_is_nan(codes, magnitude, sign_bit, format), torch.nan)
    return torch.where((codes & sign_bit) > 0, -values, values)


def _is_nan(
    codes: torch.Tensor, magnitude: torch.Tensor, sign_bit: int, format: NumberFormat
) -> torch.Tensor:
    if not format.has_nan:
        return torch.zeros_like(codes, dtype=torch.bool)
    first_nan = format.max_code + 1 + format.has_infinity
    if first_nan == sign_bit:  # the code of negative zero
        return codes == sign_bit
    return magnitude >= first_nan
