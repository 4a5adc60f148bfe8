"""Blocks of elements that share one scale: eight bits an element, integer or floating point.

A tensor is read in row-major order in blocks of ``block`` elements, the last of which may be
shorter. The scale of a block maps its largest magnitude to the largest number of the format, so
that nothing saturates. Scales and products are in float32, for float64 tensors in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import torch

from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.checks import check_is_tensor
from trainwright.collectives.errors import UsageError

_FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
_ENCODED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Elements that are encoded or decoded together on CPU: 1 MiB in float32.
_CUT = 1 << 18
# Three roundings to float32 (scale, quotient, product), in parts of the largest error.
_SLACK = 1.0 + 2.0**-14


def _check_block(codec: object, attribute: attrs.Attribute[int], block: int) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise UsageError(
            f"{type(codec).__name__}: block={block!r} must be a number of elements, at least 1; "
            "128 is usual"
        )


@attrs.frozen
class BlockInt8:
    """Integers -127..127 and a float32 scale for each block of elements.

    Encoded, a tensor is ``(int8[numel], float32[ceil(numel / block)])``: ``1 + 4 / block`` bytes an
    element; the scales of float64 tensors are float64. With A the largest magnitude of a block,
    an element is off by at most ``A / 254`` and what the arithmetic rounds (2^-14 of that); where
    the tensor's dtype is a 16-bit one, also by half a unit in its last place. Zeros stay zeros. A
    block with a value that is not finite comes back as NaN.

    Args:
        block: Elements that share a scale.
    """

    block: int = attrs.field(default=128, validator=_check_block)

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return integers and scales, as `Codec.encode` says."""
        return _encode("BlockInt8", tensor, torch.int8, self.block)

    def decode(
        self, parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return integers times scales, as `Codec.decode` says."""
        return _decode("BlockInt8", parts, shape, dtype, torch.int8, self.block)

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return half the distance of two integers for each element, as `Codec.error_bound` says.

        In units u = 2^-24 of float32: the scale is off by u of itself, the quotient by u of up to
        127, the product by as much: 510 u of half the distance, which is below 2^-14 of it.
        """
        rows = _to_rows(_to_vector("BlockInt8", tensor), self.block)
        half = _exact_scales(rows, torch.int8) / 2
        return _finish_bound(half[:, None].expand_as(rows), rows, tensor)


@attrs.frozen
class BlockFloat8:
    """Eight-bit floating-point numbers and a float32 scale for each block of elements.

    Encoded, a tensor is ``(format[numel], float32[ceil(numel / block)])``: ``1 + 4 / block`` bytes
    an element; the scales of float64 tensors are float64. With A the largest magnitude of a block,
    an element x is off by at most ``max(|x| / 16, A / 448 / 1024)`` in E4M3 and by
    ``max(|x| / 8, A / 57344 / 131072)`` in E5M2, and what the arithmetic rounds (2^-14 of that);
    where the tensor's dtype is a 16-bit one, also by half a unit in its last place. A block with a
    value that is not finite comes back as NaN.

    Args:
        block: Elements that share a scale.
        format: ``torch.float8_e4m3fn`` (more digits) or ``torch.float8_e5m2`` (more range).
    """

    block: int = attrs.field(default=128, validator=_check_block)
    format: torch.dtype = attrs.field(default=torch.float8_e4m3fn)

    @format.validator
    def _check_format(self, attribute: attrs.Attribute[torch.dtype], format: torch.dtype) -> None:
        if format not in _FORMATS:
            names = " or ".join(describe_dtype(known) for known in _FORMATS)
            raise UsageError(f"BlockFloat8: format={format!r} must be torch's {names}")

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return eight-bit numbers and scales, as `Codec.encode` says."""
        return _encode("BlockFloat8", tensor, self.format, self.block)

    def decode(
        self, parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return numbers times scales, as `Codec.decode` says."""
        return _decode("BlockFloat8", parts, shape, dtype, self.format, self.block)

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return half a unit in the last place of each element, as `Codec.error_bound` says."""
        rows = _to_rows(_to_vector("BlockFloat8", tensor), self.block)
        numbers = torch.finfo(self.format)
        floor = _exact_scales(rows, self.format) * (_smallest(self.format) / 2)
        halves = torch.maximum(rows.double().abs() * (numbers.eps / 2), floor[:, None])
        return _finish_bound(halves, rows, tensor)


def _encode(
    what: str, tensor: torch.Tensor, stored: torch.dtype, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    vector = _to_vector(what, tensor)
    numbers = vector.new_empty(vector.numel(), dtype=stored)
    scales = vector.new_empty(math.ceil(vector.numel() / block), dtype=_wide(vector.dtype))
    for elements, blocks in _cuts(vector, block):
        rows = _to_rows(vector[elements], block)
        found = scales[blocks].copy_(_scales(rows, stored))
        # No cast of NaN or of what is a rounding above the largest number is alike everywhere;
        # the scale says where a block is lost.
        largest = _largest(stored)
        quotients = rows.div_(found[:, None]).nan_to_num_(nan=0.0).clamp_(-largest, largest)
        if stored is torch.int8:
            quotients.round_()
        elif quotients.dtype is torch.float64:
            quotients = _round_to_mantissa(quotients, stored)
        target = numbers[elements]
        target.copy_(quotients.view(-1)[: target.numel()])
    return numbers, scales


def _cuts(vector: torch.Tensor, block: int) -> Iterator[tuple[slice, slice]]:
    """Yield elements and blocks that go together: all at once, or on CPU what fits in a cache.

    There fresh memory for a whole tensor costs more than the arithmetic on it.
    """
    num_blocks = math.ceil(vector.numel() / block)
    step = max(1, _CUT // block) if vector.device.type == "cpu" else max(1, num_blocks)
    for first in range(0, num_blocks, step):
        last = min(first + step, num_blocks)
        yield slice(first * block, last * block), slice(first, last)


def _to_vector(what: str, tensor: torch.Tensor) -> torch.Tensor:
    check_is_tensor(what, tensor)
    if tensor.dtype not in _ENCODED:
        raise UsageError(
            f"{what}: encodes float64, float32, bfloat16 and float16, got "
            f"{describe_dtype(tensor.dtype)}; convert it, or take torch.view_as_real of complex "
            "numbers"
        )
    return tensor.detach().reshape(-1)


def _to_rows(vector: torch.Tensor, block: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy [blocks, block] in the dtype of the scales, zeros behind the last element."""
    numel = vector.numel()
    wide = dtype or _wide(vector.dtype)
    rows = vector.new_empty((math.ceil(numel / block), block), dtype=wide)
    flat = rows.view(-1)
    if vector.dtype is torch.float8_e4m3fn and vector.device.type == "cpu":
        _widen_e4m3(vector, flat[:numel])
    else:
        flat[:numel].copy_(vector)
    flat[numel:].zero_()
    return rows


def _widen_e4m3(vector: torch.Tensor, target: torch.Tensor) -> None:
    """Write finite numbers to ``target``, several times faster than PyTorch's cast on CPU.

    With exponent and mantissa moved to where float16 has its own, E4M3 is float16 but for the
    exponents' biases, 15 and 7; numbers below the normal ones included.
    """
    bits = vector.view(torch.int8).to(torch.int16)
    signs = bits & -(1 << 15)
    target.copy_(bits.bitwise_and_(127).bitwise_left_shift_(7).bitwise_or_(signs).view(torch.half))
    target.mul_(2.0 ** (15 - 7))


def _scales(rows: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return what a one stands for in each block: NaN where an element is not finite.

    A scale times the smallest number of the format stays normal, so that no product loses digits.
    """
    smallest = torch.finfo(rows.dtype).tiny / _smallest(stored)
    scales = (rows.abs().amax(1) / _largest(stored)).clamp_min_(smallest)
    return scales.masked_fill_(~scales.isfinite(), math.nan)


def _round_to_mantissa(quotients: torch.Tensor, format: torch.dtype) -> torch.Tensor:
    """Round float64 to the digits of ``format``, because casts go by way of float32.

    Rounding twice could move a value that lies next to the middle of two numbers.
    """
    numbers = torch.finfo(format)
    magnitude = quotients.abs().clamp_min_(numbers.smallest_normal)
    # frexp gives mantissas in [0.5, 1), so the exponent is one more than that of the format.
    exponent = torch.frexp(magnitude).exponent - 1
    unit = torch.ldexp(torch.full_like(quotients, numbers.eps), exponent)
    return (quotients / unit).round_().mul_(unit)


def _decode(
    what: str,
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    stored: torch.dtype,
    block: int,
) -> torch.Tensor:
    numel = math.prod(shape)
    num_blocks = math.ceil(numel / block)
    found = [(part.dtype, part.numel()) for part in parts]
    if [length for _, length in found] != [numel, num_blocks] or found[0][0] is not stored:
        raise UsageError(
            f"{what}: shape {list(shape)} in blocks of {block} is {numel} {describe_dtype(stored)} "
            f"and {num_blocks} scales, got {found}; decode what encode returned, with its shape"
        )
    if not dtype.is_floating_point:
        raise UsageError(f"{what}: decodes to floating-point dtypes, got {describe_dtype(dtype)}")
    numbers, scales = parts[0].view(-1), parts[1].view(-1)
    whole = numbers.new_empty(tuple(shape), dtype=dtype)
    # The largest number times a rounded scale may be a rounding above what the dtype holds.
    limit = min(torch.finfo(dtype).max, torch.finfo(scales.dtype).max)
    for elements, blocks in _cuts(numbers, block):
        rows = _to_rows(numbers[elements], block, scales.dtype)
        flat = rows.mul_(scales[blocks, None]).clamp_(-limit, limit).view(-1)
        target = whole.view(-1)[elements]
        target.copy_(flat[: target.numel()])
    return whole


def _exact_scales(rows: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    scales = rows.double().abs().amax(1) / _largest(stored)
    return scales.clamp_min_(torch.finfo(rows.dtype).tiny / _smallest(stored))


def _largest(stored: torch.dtype) -> float:
    return 127.0 if stored is torch.int8 else torch.finfo(stored).max


def _smallest(stored: torch.dtype) -> float:
    if stored is torch.int8:
        return 1.0
    numbers = torch.finfo(stored)
    return numbers.smallest_normal * numbers.eps


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _finish_bound(halves: torch.Tensor, rows: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Add what the arithmetic and the tensor's own dtype round; lost blocks have no bound."""
    bound = halves * _SLACK
    numbers = torch.finfo(tensor.dtype)
    if tensor.dtype.itemsize < rows.dtype.itemsize:
        reach = (rows.double().abs() + bound) * (numbers.eps / 2)
        bound = bound + reach.clamp_min_(numbers.smallest_normal * numbers.eps / 2)
    lost = ~rows.isfinite().all(1, keepdim=True)
    bound = bound.masked_fill(lost, math.inf)
    return bound.reshape(-1)[: tensor.numel()].view(tensor.shape)
