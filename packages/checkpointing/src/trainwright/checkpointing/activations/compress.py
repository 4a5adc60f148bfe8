"""Keeps floating-point tensors in fewer bits from the forward to the backward.

Backward then sees other values, each within the codec's `error_bound` of its own: gradients are
close to those of keeping all, not equal. The output of the forward is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trainwright.checkpointing.errors import PolicyError
from trainwright.checkpointing.protocol import Held, Keeper
from trainwright.collectives.codec import BlockFloat8, BlockInt8, Codec
from trainwright.collectives.errors import UsageError

from .strided import Strided, has_gaps, is_plain

_WIDER = (torch.float64, torch.float32)
_FLOATING = (*_WIDER, torch.float16, torch.bfloat16)


@attrs.frozen
class CastBFloat16:
    """Numbers in bfloat16: 2 bytes an element, with the range of float32 and 8 bits of digits.

    An element x is off by at most ``|x| / 256``, or half the smallest number of the format
    (4.6e-41). One above the largest (3.39e38) comes back infinite. It obeys the laws of `Codec`.
    """

    def encode(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        """Return the numbers rounded to bfloat16, in a row."""
        if tensor.dtype not in _FLOATING:
            raise UsageError(f"CastBFloat16: encodes floating point, got {tensor.dtype}")
        flat = tensor.detach().reshape(-1)
        return (flat.new_empty(flat.numel(), dtype=torch.bfloat16).copy_(flat),)

    def decode(
        self, parts: Sequence[torch.Tensor], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the numbers in ``dtype``."""
        return parts[0].to(dtype, copy=True).view(tuple(shape))

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return half a unit in the last place of each element, infinite where it overflows.

        Casts of float64 round to float32 first, which adds 2^-24 of an element at most.
        """
        numbers = torch.finfo(torch.bfloat16)
        wide = tensor.detach().double().abs()
        floor = numbers.smallest_normal * numbers.eps / 2
        bound = (wide * (numbers.eps / 2 + 2.0**-23)).clamp_min_(floor)
        most = numbers.max
        if tensor.dtype is torch.float16:  # decoded to its own dtype, it is rounded again
            half = torch.finfo(torch.float16)
            bound += (wide * half.eps).clamp_min_(half.smallest_normal * half.eps)
            most = 65280.0  # the next number of bfloat16 is more than float16 holds
        return bound.masked_fill_(~(wide <= most), float("inf"))


@attrs.frozen(eq=False)
class HeldEncoded:
    """A tensor as the parts that a codec made of it, each held in turn by another keeper."""

    codec: Codec
    layout: Strided
    has_gaps: bool
    parts: tuple[torch.Tensor | Held, ...]

    @property
    def resident(self) -> tuple[torch.Tensor, ...]:
        """The parts that live where the model runs."""
        found: list[torch.Tensor] = []
        for part in self.parts:
            found += [part] if isinstance(part, torch.Tensor) else part.resident
        return tuple(found)

    def restore(self) -> torch.Tensor:
        """Return the tensor, decoded; without the gaps that it had among others' elements."""
        parts = [p if isinstance(p, torch.Tensor) else p.restore() for p in self.parts]
        layout = self.layout
        decoded = self.codec.decode(parts, layout.shape_of_elements, layout.dtype)
        if decoded.stride() == layout.stride:
            return decoded
        if self.has_gaps:
            return layout.spread(decoded)
        return layout.spread(layout.empty().copy_(decoded))


@attrs.frozen
class Compress:
    """Keeper of floating-point tensors in the form that a codec gives them.

    Tensors that the codec would not make smaller stay as they are, and so do those of other
    dtypes, such as masks and indices, and statistics: tensors of one number for each row of one
    that was saved before, as norms and attention kernels save. Their bytes are few, and an error
    would count for a whole row.

    Args:
        codec: Such as `trainwright.collectives.codec.BlockInt8`.
        then: Holds the encoded parts, and tensors that are not encoded; None keeps them where they
            are.
        min_bytes: Smaller tensors stay as they are.
    """

    codec: Codec = attrs.field()
    then: Keeper | None = attrs.field(default=None, kw_only=True)
    min_bytes: int = attrs.field(default=1024, kw_only=True)

    @codec.validator
    def _check_codec(self, attribute: object, value: object) -> None:
        if isinstance(value, type) or not isinstance(value, Codec):
            raise PolicyError(f"Compress needs a codec, such as BlockInt8(), got {value!r}")

    def hold(self, tensor: torch.Tensor) -> Held | None:
        """Return the tensor encoded, or as ``then`` holds it; None where it stays as it is."""
        encoded = self._encoded(tensor)
        if encoded is None:
            return self.hold_exactly(tensor)
        parts = [self.hold_exactly(part) or part for part in encoded]
        return HeldEncoded(self.codec, Strided.of(tensor), has_gaps(tensor), tuple(parts))

    def hold_exactly(self, tensor: torch.Tensor) -> Held | None:
        """Return the tensor as ``then`` holds it, for one that must not lose anything."""
        return None if self.then is None else self.then.hold(tensor)

    def _encoded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype not in _FLOATING or size < self.min_bytes or not is_plain(tensor):
            return None
        if tensor.dim() == 0 or tensor.shape[-1] == 1:
            return None
        if isinstance(self.codec, CastBFloat16) and tensor.dtype not in _WIDER:
            return None
        elements = Strided.of(tensor).take(tensor)
        encoded = self.codec.encode(elements)
        kept = sum(part.numel() * part.element_size() for part in encoded)
        return encoded if kept < elements.numel() * elements.element_size() else None


def codec_named(text: str) -> Codec:
    """Return the codec that ``text`` names: ``int8``, ``fp8`` (E4M3) or ``bf16``.

    Raises:
        PolicyError: There is no such codec.
    """
    codecs = {"int8": BlockInt8, "fp8": BlockFloat8, "bf16": CastBFloat16}
    if text not in codecs:
        raise PolicyError(f"compression must be int8, fp8 or bf16, got {text!r}")
    codec: Codec = codecs[text]()
    return codec
