"""From places to random bits, and from bits to the elements of a draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainwright.collectives.box import Box
from trainwright.collectives.errors import UsageError

from .key import Key
from .philox import Words, run_rounds
from .places import Indices, walk

_MASK = 0xFFFFFFFF
_ATTEMPT_SHIFT = 16

Pair = tuple[torch.Tensor, torch.Tensor]
# From the 63-bit integers of a block's two elements to what the draw makes of them.
Transform = Callable[[torch.Tensor, torch.Tensor], Pair]


def draw_box(
    key: Key,
    shape: Sequence[int],
    box: Box | None,
    dtype: torch.dtype,
    device: torch.device | str,
    transform: Transform,
) -> torch.Tensor:
    """Return a box of the global tensor of ``shape`` that ``transform`` makes of random bits."""
    part, at = prepare(shape, box, device)
    drawn = torch.empty(part.numel, dtype=dtype, device=at)
    for where, indices in walk(shape, part, at):
        drawn[where] = at_places(key, indices, at, transform)
    return drawn.view(part.shape)


def draw_places(
    key: Key, indices: torch.Tensor, dtype: torch.dtype, transform: Transform
) -> torch.Tensor:
    """Return the elements at flat positions in a global tensor."""
    if indices.dtype != torch.int64:
        raise UsageError(f"indices must be int64, got {indices.dtype}")
    return at_places(key, indices, indices.device, transform).to(dtype)


def prepare(
    shape: Sequence[int], box: Box | None, device: torch.device | str
) -> tuple[Box, torch.device]:
    """Return the box to draw, checked, and the device."""
    whole = Box.full(shape)
    part = whole if box is None else box
    part.check_within(whole.shape)
    return part, torch.device(device)


def at_places(
    key: Key, indices: Indices, device: torch.device, transform: Transform, attempt: int = 0
) -> torch.Tensor:
    """Return what ``transform`` makes of the bits at ``indices``, in its own dtype."""
    if isinstance(indices, torch.Tensor):
        even, odd = transform(*_block_bits(key, indices >> 1, attempt))
        return torch.where((indices & 1).bool(), odd, even)
    first = indices.start // 2
    blocks = torch.arange(first, (indices.stop + 1) // 2, device=device)
    pair = torch.stack(transform(*_block_bits(key, blocks, attempt)), dim=1)
    return pair.view(-1)[indices.start - 2 * first : indices.stop - 2 * first]


def as_tensor(indices: Indices, device: torch.device) -> torch.Tensor:
    """Return indices as an int64 tensor."""
    if isinstance(indices, torch.Tensor):
        return indices
    return torch.arange(indices.start, indices.stop, device=device)


def same_bits(bits0: torch.Tensor, bits1: torch.Tensor) -> Pair:
    """Leave the 63-bit integers as they are."""
    return bits0, bits1


def to_unit(bits: torch.Tensor) -> torch.Tensor:
    """Return the upper 53 of 63 bits as a float64 number in [0, 1)."""
    return (bits >> 10).double().mul_(2.0**-53)


def block_words(key: Key, blocks: torch.Tensor, attempt: int = 0) -> Words:
    """Return the four random words of each block."""
    step_high = key.step >> 32 | attempt << _ATTEMPT_SHIFT
    counter = (
        blocks & _MASK,
        blocks >> 32,
        torch.full_like(blocks, key.step & _MASK),
        torch.full_like(blocks, step_high),
    )
    return run_rounds(counter, *key.words)


def _block_bits(key: Key, blocks: torch.Tensor, attempt: int) -> Pair:
    """Return 63 random bits for each of the two elements of each block."""
    w0, w1, w2, w3 = block_words(key, blocks, attempt)
    return _join_words(w0, w1), _join_words(w2, w3)


def _join_words(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    # 63 of the 64 bits: the sign bit stays clear.
    return high.bitwise_left_shift_(31).bitwise_or_(low.bitwise_right_shift_(1))
