"""Weights that travel as FP8 codes between ranks that keep parts of them."""

from __future__ import annotations

import attrs
import torch

from trainwright.precision.formats import (
    E4M3,
    BlockQuantized,
    NumberFormat,
    amax,
    encode_scaled,
    scale_from_amax,
)

from .operands import check_format, format_name


@attrs.frozen
class Float8Codec:
    """One byte an element and one scale a tensor, for ``ShardPolicy(weight_codec=…)``.

    What is decoded is, bit for bit, what the whole weight gives that is quantised by
    `Current` with this format and ``power_of_two``, rounded to the weight's dtype. With powers of
    two, the default, nothing is rounded, and a product under ``Current(power_of_two=True)``, which
    quantises it again, multiplies what it would of the weight itself. Other recipes round twice.

    Args:
        format: of the codes.
        power_of_two: whether scales are powers of two.
    """

    format: NumberFormat = attrs.field(default=E4M3, validator=check_format, repr=format_name)
    power_of_two: bool = True

    def measure(self, part: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude, 0-d float32; infinite where a number is not finite."""
        return amax(part).float().nan_to_num(nan=torch.inf, posinf=torch.inf)

    def encode(self, part: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of a flat part."""
        return encode_scaled(part, self._scale(measured), self.format)

    def decode(
        self, codes: torch.Tensor, measured: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weights; NaN throughout where the tensor was not finite."""
        if codes.numel() == 0:
            return torch.empty(codes.shape, dtype=dtype, device=codes.device)
        scale = self._scale(measured).reciprocal().reshape(1, 1)
        coded = BlockQuantized(codes[None], scale, self.format, (1, codes.numel()))
        return coded.dequantize(dtype)[0]

    def _scale(self, measured: torch.Tensor) -> torch.Tensor:
        return scale_from_amax(measured, self.format, power_of_two=self.power_of_two)
