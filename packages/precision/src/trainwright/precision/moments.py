"""Forms in which an optimizer's moments are kept between steps: BF16, or eight bits in blocks.

A moment that moves by a thousandth a step would stand still if it were rounded to the nearest of so
few numbers. Here it is rounded up with the probability that keeps its expected value, by draws of
a table that every parameter and step enters at a place of its own.

A tensor without negative values, as of second moments, needs no sign: its eight bits are five of
exponent and three of mantissa, so that squares, too, reach down to 2**-34 of the largest of a
block. A positive value never becomes zero: a gradient's average would be divided by epsilon alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from trainwright.collectives.random import Key, permutation
from trainwright.precision.block_codes import (
    decode_blocks,
    encode_blocks,
    measure_blocks,
    positive,
)
from trainwright.precision.errors import PrecisionError
from trainwright.precision.formats import E4M3, NumberFormat, Specials

E5M3 = NumberFormat("E5M3", 5, 3, 15, Specials.NONE)
"""Of its nine bits, those without the sign are kept."""

_PIECE = 1 << 16
_DRAWS = 1 << 16
_FORMATS = {"e4m3": E4M3, "e5m3": E5M3}
# A moment as it is kept: the name of its format, its codes, and scales and block where it has some.
Kept = dict[str, Any]


@attrs.frozen
class Place:
    """Which moment is encoded: all ranks with the same place and values get the same codes."""

    parameter: str
    moment: str
    update: int


class Dither:
    """Draws of 16 bits, each equally often in a table, which is entered at drawn places."""

    def __init__(self, device: torch.device) -> None:
        order = permutation(Key(0, "moments"), _DRAWS).to(device, torch.int32)
        self._table = torch.cat((order, order[:_PIECE]))

    def pieces(self, numel: int, place: Place) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield ranges of elements, and their draws."""
        for first in range(0, numel, _PIECE):
            text = f"{place.parameter}/{place.moment}/{place.update}/{first}"
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=2).digest()
            start = int.from_bytes(digest, "little")
            last = min(first + _PIECE, numel)
            yield slice(first, last), self._table[start : start + last - first]


class Moments(Protocol):
    """Says how state tensors shaped like their parameter are kept between steps.

    Laws: the expected value of what `decode_moment` gives is the value encoded, but for what is
    positive and below the smallest number of a tensor without negative ones, which becomes that
    number; numbers of the form come back as they were; what is not finite never becomes finite.
    """

    def keeps(self, moment: torch.Tensor) -> bool:
        """Whether a float32 state tensor is kept in this form; else it stays as it is."""
        ...

    def has_form(self, kept: Mapping[str, Any]) -> bool:
        """Whether a kept moment is of this form."""
        ...

    def encode(self, moment: torch.Tensor, draws: Dither, place: Place) -> Kept:
        """Return the moment as it is kept: "format" and "codes", and what belongs to these."""
        ...


@attrs.frozen
class BFloat16Moments:
    """Two bytes an element: eight significant bits, the range of float32."""

    def keeps(self, moment: torch.Tensor) -> bool:
        """Whether it has elements, rather than being a number such as a count of steps."""
        return moment.ndim > 0

    def has_form(self, kept: Mapping[str, Any]) -> bool:
        """Whether it is BF16."""
        return bool(kept["format"] == "bfloat16")

    def encode(self, moment: torch.Tensor, draws: Dither, place: Place) -> Kept:
        """Return the moment rounded."""
        flat = moment.detach().reshape(-1)
        rounded = torch.empty_like(flat, dtype=torch.bfloat16)
        unsigned = _has_no_negative(flat)
        for where, drawn in draws.pieces(flat.numel(), place):
            rounded[where] = round_to_bfloat16(flat[where], drawn)
            if unsigned:
                # The smallest positive number is the one after zero, as bits are.
                bits = rounded[where].view(torch.int16)
                torch.maximum(bits, positive(flat[where]).to(torch.int16), out=bits)
        return {"format": "bfloat16", "codes": rounded.view(moment.shape)}


@attrs.frozen
class BlockMoments:
    """A byte an element and a float32 power of two a block: ``1 + 4 / block`` bytes an element.

    Four significant bits: E4M3, or E5M3 without sign where no value is negative. A scale that is a
    power of two leaves all numbers of a block where they are when its largest one changes.

    Args:
        block: elements, in row-major order, that share a scale.
        min_numel: tensors with fewer elements, such as those of norms and biases, stay float32.

    Raises:
        PrecisionError: a number is below 1, or ``block`` no divisor of 65536.
    """

    block: int = 256
    min_numel: int = 4096

    def __attrs_post_init__(self) -> None:
        if self.min_numel < 1 or self.block < 1 or _PIECE % self.block:
            raise PrecisionError(
                f"BlockMoments needs a power of two up to {_PIECE} as block and min_numel of at "
                f"least 1, got {self.block} and {self.min_numel}; 256 and 4096 are usual"
            )

    def keeps(self, moment: torch.Tensor) -> bool:
        """Whether it has enough elements."""
        return moment.ndim > 0 and moment.numel() >= self.min_numel

    def has_form(self, kept: Mapping[str, Any]) -> bool:
        """Whether it has blocks of this size."""
        return kept["format"] in _FORMATS and kept["block"] == self.block

    def encode(self, moment: torch.Tensor, draws: Dither, place: Place) -> Kept:
        """Return codes and scales."""
        flat = moment.detach().reshape(-1)
        amax, unsigned = measure_blocks(flat, self.block)
        name = "e5m3" if unsigned else "e4m3"
        drawn = draws.pieces(flat.numel(), place)
        codes, scales = encode_blocks(flat, amax, drawn, _FORMATS[name], self.block)
        shaped = codes.view(moment.shape)
        return {"format": name, "codes": shaped, "scales": scales, "block": self.block}


def decode_moment(kept: Mapping[str, Any], out: torch.Tensor) -> None:
    """Write a moment that is kept in any of the forms to a contiguous float32 tensor."""
    codes, target = kept["codes"].reshape(-1), out.view(-1)
    if kept["format"] == "bfloat16":
        target.copy_(codes)
        return
    decode_blocks(codes, kept["scales"], _FORMATS[kept["format"]], kept["block"], target)


def check_kept(name: str, key: str, kept: Mapping[str, Any], shape: torch.Size) -> None:
    """Raise PrecisionError unless a kept moment is one of a tensor of ``shape``."""
    known = kept.get("format") in ("bfloat16", *_FORMATS)
    codes = kept.get("codes")
    if not known or not isinstance(codes, torch.Tensor) or codes.shape != shape:
        found = tuple(codes.shape) if isinstance(codes, torch.Tensor) else None
        raise PrecisionError(
            f"{key} of {name} must be codes of bfloat16, e4m3 or e5m3 of shape {tuple(shape)}, got "
            f"{kept.get('format')!r} of shape {found}"
        )
    wanted = torch.bfloat16 if kept["format"] == "bfloat16" else torch.uint8
    if codes.dtype != wanted:
        raise PrecisionError(f"{key} of {name} must have codes of {wanted}, got {codes.dtype}")
    if wanted == torch.uint8:
        _check_blocks(f"{key} of {name}", kept.get("block"), kept.get("scales"), codes.numel())


def _check_blocks(what: str, block: object, scales: object, numel: int) -> None:
    if type(block) is not int or block < 1 or _PIECE % block:
        raise PrecisionError(f"{what} must have a power of two up to {_PIECE} as block: {block!r}")
    count = -(-numel // block)
    is_one = isinstance(scales, torch.Tensor) and scales.dtype == torch.float32
    if not is_one or scales.shape != (count,):  # type: ignore[attr-defined]
        found = tuple(scales.shape) if isinstance(scales, torch.Tensor) else scales
        raise PrecisionError(f"{what} must have {count} float32 scales, got {found!s:.80}")


def round_to_bfloat16(values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return float32 values of one dim in BF16, up where the dropped bits and draws carry.

    Args:
        values: contiguous.
        draws: int32, 0 to 2**16 - 1.
    """
    bits = values.view(torch.int32) + draws
    rounded = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    # A NaN of many ones would carry into the sign; on a CPU a look is cheaper than a mask.
    on_cpu = values.device.type == "cpu" and values.numel() > 0
    if not on_cpu or bool(values.amax().isnan()):
        rounded.masked_fill_(values.isnan(), torch.nan)
    return rounded


def _has_no_negative(values: torch.Tensor) -> bool:
    return values.numel() > 0 and bool(values.amin() >= 0)
