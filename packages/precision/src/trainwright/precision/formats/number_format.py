"""A binary number format as a value: its fields, its numbers, its codes."""

from __future__ import annotations

import enum

import attrs
import torch

from trainwright.precision.errors import PrecisionError

from .decoding import decode_codes
from .encoding import SpecialCodes, encode_values
from .packing import pack_codes, unpack_codes
from .rounding import Rounding, nearest_even

_TABLE_BITS = 16


class Specials(enum.Enum):
    """Which codes are not finite numbers."""

    IEEE = "infinities and NaNs at the top exponent"
    ALL_ONES = "no infinity; NaN where all bits below the sign are ones"
    NEGATIVE_ZERO = "no infinity and no negative zero; NaN at the code of negative zero"
    NONE = "every code is a finite number"


@attrs.frozen
class NumberFormat:
    """Sign, exponent and mantissa, high bits first, and what the codes at the edges mean.

    A code is the format's bit pattern as a non-negative integer. Every number of a format is a
    float32 number, so that decoding is exact. An unsigned format holds powers of two only, and no
    zero: it is for scales.

    Args:
        name: as the field calls it, such as "E4M3".
        exponent_bits: 1 to 8.
        mantissa_bits: 0 to 23, without the implicit bit.
        bias: what is subtracted from the exponent field.
        specials: which codes are no finite numbers.
        signed: whether the highest bit is a sign.
        dtype: torch's dtype with these codes, if there is one.

    Raises:
        PrecisionError: the fields make no format, or one with numbers that float32 has not.

    Source:
        IEEE 754; Micikevicius et al., FP8 formats for deep learning (2022); OCP 8-bit floating
        point 1.0; OCP microscaling formats 1.0.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials = attrs.field(repr=lambda kind: kind.name)
    signed: bool = True
    dtype: torch.dtype | None = None

    def __attrs_post_init__(self) -> None:
        if not (1 <= self.exponent_bits <= 8 and 0 <= self.mantissa_bits <= 23):
            raise PrecisionError(
                f"format {self.name} needs 1 to 8 exponent and 0 to 23 mantissa bits, got "
                f"{self.exponent_bits} and {self.mantissa_bits}"
            )
        if not self.signed and (self.mantissa_bits or self.specials is not Specials.ALL_ONES):
            raise PrecisionError(
                f"format {self.name} is unsigned: it then holds powers of two and one NaN, with "
                f"no mantissa bit and specials=ALL_ONES, got {self.mantissa_bits} and "
                f"{self.specials.name}"
            )
        if self.max_code < 1:
            raise PrecisionError(f"format {self.name} has no code left for a positive number")
        lowest = self.emin - (self.mantissa_bits if self.signed else 0)
        if self.emax > 127 or lowest < -149:
            raise PrecisionError(
                f"the numbers of format {self.name} go from 2**{lowest} to 2**{self.emax}, those "
                f"of float32 from 2**-149 to 2**127; choose another bias than {self.bias}"
            )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def max_code(self) -> int:
        """The code of the largest finite number."""
        below_sign = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        if self.specials is Specials.IEEE:
            return below_sign - (1 << self.mantissa_bits)
        return below_sign - (self.specials is Specials.ALL_ONES)

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal number."""
        return (1 if self.signed else 0) - self.bias

    @property
    def emax(self) -> int:
        """The exponent of the largest number."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def eps(self) -> float:
        """The distance from one to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def max(self) -> float:
        """The largest finite number."""
        fraction = (self.max_code & ((1 << self.mantissa_bits) - 1)) * self.eps
        return (1.0 + fraction) * 2.0**self.emax

    @property
    def min_normal(self) -> float:
        """The smallest positive number with all digits."""
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float | None:
        """The smallest positive number below the normal ones; None without such numbers."""
        has_some = self.signed and self.mantissa_bits > 0
        return 2.0 ** (self.emin - self.mantissa_bits) if has_some else None

    @property
    def has_infinity(self) -> bool:
        """Whether there are codes for infinities."""
        return self.specials is Specials.IEEE

    @property
    def has_nan(self) -> bool:
        """Whether there is a code for NaN."""
        return self.specials is not Specials.NONE

    def code_points(self, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the number of every code, the code being the index.

        Raises:
            PrecisionError: there are more than 2**16 codes.
        """
        if self.bits > _TABLE_BITS:
            raise PrecisionError(
                f"{self.name} has 2**{self.bits} codes, too many for a table; decode the ones that "
                "you need"
            )
        return self.decode(torch.arange(1 << self.bits), dtype=dtype)

    def decode(self, codes: torch.Tensor, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers of codes, exactly, NaN with its sign.

        Args:
            codes: integers of any shape, 0 to 2**bits - 1.
            dtype: float32 or float64.

        Raises:
            PrecisionError: a code is out of range, or the dtype another one.
        """
        return decode_codes(codes, self, dtype)

    def encode(
        self, values: torch.Tensor, *, rounding: Rounding = nearest_even, saturate: bool = True
    ) -> torch.Tensor:
        """Return the codes of values, rounded once, from float64 too.

        Too large is what would round beyond the largest number if exponents went on; infinity
        always is. NaN stays NaN with its sign, without its payload; formats without NaN make it a
        zero of the other sign, as ml_dtypes does: look for NaN before.

        Args:
            values: of any floating-point dtype and shape.
            rounding: `nearest_even`, `toward_zero` or a `Stochastic`; another `Rounding` likewise.
            saturate: True gives the codes of PyTorch 2.13's casts on CPU: too large becomes the
                largest number where the format has NaN at all ones or no NaN; infinity where it
                has infinities; NaN where NaN is the code of negative zero. E8M0 takes magnitudes,
                2**-127 for zero and 2**-126 for what is just above; too large is NaN. False gives
                those of ml_dtypes: as before, but too large becomes NaN where NaN is at all ones,
                and E8M0 makes NaN of zero and of negative values.

        Returns:
            Non-negative integers of the shape of ``values``: uint8 for formats of up to 8 bits,
            int32 up to 16, int64 above.

        Raises:
            PrecisionError: the values are not floating-point.
        """
        return encode_values(values, self, rounding, self._special_codes(saturate))

    def encode_clamped(
        self, values: torch.Tensor, *, rounding: Rounding = nearest_even
    ) -> torch.Tensor:
        """Return codes as `encode` does, but of the largest number for all that is too large."""
        special = attrs.evolve(self._special_codes(True), too_large=self.max_code)
        return encode_values(values, self, rounding, special)

    def as_torch(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes as a tensor of ``dtype``; two 4-bit codes go in a byte, low half first.

        Raises:
            PrecisionError: torch has no such dtype, or the last dim of 4-bit codes is odd.
        """
        return pack_codes(codes, self.name, self.bits, self.dtype)

    def codes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the codes of a tensor of ``dtype``, as `encode` gives them.

        Raises:
            PrecisionError: the tensor has another dtype.
        """
        return unpack_codes(tensor, self.name, self.bits, self.dtype)

    def _special_codes(self, saturate: bool) -> SpecialCodes:
        ones = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        # PyTorch's casts to eight bits set all of a NaN's mantissa, ml_dtypes only its first bit.
        quiet = ones if saturate else self.max_code + 1 + (1 << max(self.mantissa_bits - 1, 0))
        if self.specials is Specials.IEEE:
            return SpecialCodes(too_large=self.max_code + 1, nan=quiet)
        if self.specials is Specials.NEGATIVE_ZERO:
            return SpecialCodes(too_large=ones + 1, nan=ones + 1, negative_zero=False)
        if self.specials is Specials.NONE:
            return SpecialCodes(too_large=self.max_code, nan=None)
        too_large = self.max_code if saturate and self.signed else ones
        return SpecialCodes(too_large, nan=ones, magnitudes=saturate)
