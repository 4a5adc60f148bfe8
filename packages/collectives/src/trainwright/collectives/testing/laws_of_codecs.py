"""What every codec keeps to."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from trainwright.collectives.codec.protocol import Codec

CodecLaw = Callable[[Codec, torch.Tensor], None]


def elements_come_back_within_the_bound(codec: Codec, tensor: torch.Tensor) -> None:
    """Each finite element is off by at most the bound, in its own dtype and in wider ones."""
    bound = codec.error_bound(tensor)
    assert bound.shape == tensor.shape
    assert bound.dtype is torch.float64
    for dtype in {tensor.dtype, _wide(tensor.dtype)}:
        decoded = codec.decode(codec.encode(tensor), tensor.shape, dtype)
        assert decoded.shape == tensor.shape
        assert decoded.dtype is dtype
        assert decoded.is_contiguous()
        bounded = bound.isfinite()
        error = (decoded.double() - tensor.double()).abs()
        assert bool((error[bounded] <= bound[bounded]).all())


def sizes_follow_from_shape_and_dtype(codec: Codec, tensor: torch.Tensor) -> None:
    """Other values in the same shape and dtype are encoded to the same shapes and dtypes."""
    parts = codec.encode(tensor)
    others = codec.encode(torch.zeros_like(tensor))
    assert [(part.shape, part.dtype) for part in parts] == [
        (other.shape, other.dtype) for other in others
    ]
    assert all(part.is_contiguous() for part in parts)


def the_same_values_give_the_same_bits(codec: Codec, tensor: torch.Tensor) -> None:
    """Strides and repetition change nothing, and the tensor is only read."""
    before = tensor.clone()
    spread = tensor.new_empty((*tensor.shape, 2))
    spread[..., 0] = tensor
    spread[..., 1] = math.nan
    for again in (tensor, spread[..., 0]):
        for part, other in zip(codec.encode(tensor), codec.encode(again), strict=True):
            assert torch.equal(_bytes(part), _bytes(other))
    assert torch.equal(_bytes(before), _bytes(tensor))


def what_is_not_finite_shows(codec: Codec, tensor: torch.Tensor) -> None:
    """No infinity and no NaN turns into a number."""
    for value in (math.inf, -math.inf, math.nan):
        for place in (0, tensor.numel() - 1):
            if not tensor.numel():
                continue
            broken = tensor.clone()
            broken.view(-1)[place] = value
            decoded = codec.decode(codec.encode(broken), tensor.shape, tensor.dtype)
            assert not bool(decoded.view(-1)[place].isfinite())
            assert bool(codec.error_bound(broken).view(-1)[place].isinf())


CODEC_LAWS: tuple[CodecLaw, ...] = (
    elements_come_back_within_the_bound,
    sizes_follow_from_shape_and_dtype,
    the_same_values_give_the_same_bits,
    what_is_not_finite_shows,
)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
