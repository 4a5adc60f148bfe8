"""Between codes, one an element, and torch's dtypes."""

from __future__ import annotations

import torch

from trainwright.precision.errors import PrecisionError

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def pack_codes(
    codes: torch.Tensor, name: str, bits: int, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return codes as a tensor of torch's dtype; two 4-bit codes a byte, low half first."""
    if dtype is None:
        raise PrecisionError(f"torch has no dtype for {name}; keep the codes, or decode() them")
    if bits > 4:
        # Out of the range of a signed integer is wrapped: the bits stay.
        return codes.to(_INTEGERS[bits]).view(dtype)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise PrecisionError(
            f"two codes of {name} go in a byte: the last dim must be even, got shape "
            f"{list(codes.shape)}; pad it by a zero"
        )
    raw = codes.to(torch.uint8)
    return (raw[..., ::2] | raw[..., 1::2] << 4).view(dtype)


def unpack_codes(
    tensor: torch.Tensor, name: str, bits: int, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return the codes in a tensor of torch's dtype."""
    if dtype is None or tensor.dtype is not dtype:
        raise PrecisionError(
            f"codes of {name} are in tensors of {dtype}, got {tensor.dtype}; encode() values"
        )
    if bits == 4:
        pairs = tensor.view(torch.uint8)
        return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    raw = tensor.view(_INTEGERS[bits])
    if bits == 8:
        return raw.clone()
    return raw.to(torch.int32 if bits == 16 else torch.int64) & ((1 << bits) - 1)
