"""Draws of 32 random bits, the cheapest there are: a block of Philox serves four elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.box import Box

from .elements import block_words, prepare
from .key import Key
from .places import Indices, walk


def words(
    key: Key,
    shape: Sequence[int],
    *,
    box: Box | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return integers 0 to 2**32 - 1, all equally likely.

    Element ``i`` of the global tensor is word ``i % 4`` of block ``i // 4``.

    Args:
        key: Which random tensor.
        shape: Shape of the global tensor.
        box: The part of it to compute; None: all of it.
        device: Where to compute and return it.

    Returns:
        Int64 tensor of ``box.shape``.

    Raises:
        UsageError: The box is not within ``shape``.
    """
    part, at = prepare(shape, box, device)
    drawn = torch.empty(part.numel, dtype=torch.int64, device=at)
    for where, indices in walk(shape, part, at):
        drawn[where] = _at_places(key, indices, at)
    return drawn.view(part.shape)


def _at_places(key: Key, indices: Indices, device: torch.device) -> torch.Tensor:
    if isinstance(indices, torch.Tensor):
        four = torch.stack(block_words(key, indices >> 2), dim=-1)
        return four.gather(-1, (indices & 3)[..., None])[..., 0]
    first = indices.start // 4
    blocks = torch.arange(first, (indices.stop + 3) // 4, device=device)
    four = torch.stack(block_words(key, blocks), dim=1)
    return four.view(-1)[indices.start - 4 * first : indices.stop - 4 * first]
