"""What maps the largest magnitude of a tensor, row or block onto the largest number of a format."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Protocol

import torch

from trainwright.precision.errors import PrecisionError

from .number_format import NumberFormat

_MANTISSA_BITS = 52
_BIAS = 1023


class ExponentRule(Protocol):
    """Says by which power of two a block is divided; see `floor_exponent`, `ceil_exponent`."""

    def __call__(self, amax: torch.Tensor, format: NumberFormat) -> torch.Tensor:
        """Return int64 exponents for non-negative finite ``amax``, far below all others for 0."""
        ...


def amax(
    tensor: torch.Tensor, dim: int | Sequence[int] | None = None, *, keepdim: bool = False
) -> torch.Tensor:
    """Return the largest magnitude: 0 of nothing, NaN where there is a NaN.

    Args:
        tensor: of any floating-point dtype and shape.
        dim: the dims over which it is taken; None: all.
        keepdim: whether they stay, with size 1.

    Returns:
        float32; float64 for float64.

    Raises:
        PrecisionError: the tensor is not floating-point.
    """
    if not tensor.dtype.is_floating_point:
        raise PrecisionError(f"amax is taken of floating-point tensors, got {tensor.dtype}")
    given = tuple(range(tensor.ndim)) if dim is None else dim
    dims = (given,) if isinstance(given, int) else tuple(given)
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    numbers = tensor.detach() if tensor.dtype.itemsize > 1 else tensor.detach().float()
    if tensor.numel() == 0:
        # A sum has a value where there is nothing to compare.
        return numbers.sum(dims, keepdim).to(wide)
    # Two passes that hold nothing, instead of one that holds all magnitudes.
    largest, smallest = numbers.amax(dims, keepdim), numbers.amin(dims, keepdim)
    return torch.maximum(largest.abs(), smallest.abs()).to(wide)


def scale_from_amax(
    amax: torch.Tensor, format: NumberFormat, margin: int = 0, *, power_of_two: bool = False
) -> torch.Tensor:
    """Return what a tensor is multiplied by before it is encoded, and divided by afterwards.

    It is ``format.max / amax / 2**margin``, or with ``power_of_two`` the largest power of two with
    ``amax * scale <= format.max``, exactly, over ``2**margin``. It is kept between the smallest
    normal number and its reciprocal (2**-126 and 2**126 in float32), so that a finite amax,
    however tiny or huge, gives a scale that is positive, finite and has a normal reciprocal. Zero,
    as of a zero or empty tensor, gives 1. What is lost is shown: NaN, infinite and negative amax
    give NaN.

    Args:
        amax: float32 or float64, any shape.
        format: where to.
        margin: powers of two that are left free above.
        power_of_two: whether multiplying must not round.

    Returns:
        Tensor like ``amax``.

    Raises:
        PrecisionError: ``amax`` has another dtype, or ``margin`` is no integer from 0 to 64.
    """
    _check_amax(amax)
    margin = _checked_margin(margin)
    smallest = torch.finfo(amax.dtype).tiny
    if power_of_two:
        limit = round(-math.log2(smallest))
        exponent = (-ceil_exponent(amax, format) - margin).clamp_(-limit, limit)
        scale = power_of_two_of(exponent).to(amax.dtype)
    else:
        scale = (format.max * 2.0**-margin / amax).clamp_(smallest, 1.0 / smallest)
    scale.masked_fill_(amax == 0, 1.0)
    # Adds zero, or NaN to what is no magnitude: blocks have many small tensors of these.
    return scale.add_(amax.sqrt().mul_(0.0))


def floor_exponent(amax: torch.Tensor, format: NumberFormat) -> torch.Tensor:
    """Return floor(log2(amax)) less the format's largest exponent, as OCP's MX has it.

    What is above ``format.max * 2**exponent``, less than one exponent above it, saturates.
    """
    return _log2(amax)[0] - format.emax


def ceil_exponent(amax: torch.Tensor, format: NumberFormat) -> torch.Tensor:
    """Return the smallest exponent with ``amax <= format.max * 2**exponent``: nothing saturates."""
    exponent, fraction = _log2(amax)
    largest = torch.tensor(format.max, dtype=torch.float64, device=amax.device)
    return exponent - format.emax + (fraction > _log2(largest)[1])


def is_amax(amax: torch.Tensor) -> torch.Tensor:
    """Say where a largest magnitude is one: not negative, finite, not NaN."""
    return (amax >= 0) & (amax < math.inf)


def power_of_two_of(exponent: torch.Tensor) -> torch.Tensor:
    """Return float64 powers of two for int64 exponents -1022 to 1023."""
    return ((exponent + _BIAS) << _MANTISSA_BITS).view(torch.float64)


def _log2(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exponent of non-negative numbers, and the digits behind their first as int64."""
    raw = values.double().contiguous().view(torch.int64)
    return (raw >> _MANTISSA_BITS) - _BIAS, raw & ((1 << _MANTISSA_BITS) - 1)


def _check_amax(amax: torch.Tensor) -> None:
    if amax.dtype not in (torch.float32, torch.float64):
        raise PrecisionError(
            f"amax must be float32 or float64, as amax() returns it, got {amax.dtype}"
        )


def _checked_margin(margin: int) -> int:
    try:
        number = operator.index(margin)
    except TypeError as error:
        raise PrecisionError(f"margin must be an integer, got {margin!r}") from error
    if not 0 <= number <= 64:
        raise PrecisionError(f"margin must be 0 to 64 powers of two, got {number}")
    return number
