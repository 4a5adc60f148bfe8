"""Compares what a recomputation saves with what the forward saved, bit by bit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from trainwright.checkpointing.errors import ReplayError

from .strided import Strided, is_plain


class Fingerprints:
    """One number for each tensor that a forward saved, in order."""

    def __init__(self) -> None:
        self._of_forward: list[torch.Tensor | None] = []

    def taking(self) -> AbstractContextManager[object]:
        """Note what the hooks that are in force save."""
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return nullcontext()
        save, load = hooks

        def pack(tensor: torch.Tensor) -> object:
            self._of_forward.append(fingerprint(tensor) if is_plain(tensor) else None)
            return save(tensor)

        return saved_tensors_hooks(pack, load)

    def comparing(self) -> AbstractContextManager[object]:
        """Compare what the hooks that are in force save with what was noted.

        Raises:
            ReplayError: Where a tensor differs.
        """
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None:
            return nullcontext()
        save, load = hooks
        expected = enumerate(self._of_forward)

        def pack(tensor: torch.Tensor) -> object:
            number, before = next(expected, (-1, None))
            if before is not None and not _has(tensor, before):
                raise ReplayError(
                    f"saved tensor {number} of shape {list(tensor.shape)} has other values in the "
                    "recomputation than in the forward; what it depends on (random numbers of "
                    "Python, numpy or a hidden generator, a global, a kernel that is not "
                    "deterministic) is not replayed: capture it, decide_once, or keep the layer"
                )
            return save(tensor)

        return saved_tensors_hooks(pack, load)


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Return one int64 that depends on every bit of a tensor that `is_plain`, and on its place."""
    with torch.no_grad():
        elements = Strided.of(tensor).take(tensor.detach()).reshape(-1).view(torch.uint8)
        num_words = elements.numel() // 8
        words = elements[: num_words * 8].clone().view(torch.int64)
        rest = elements[num_words * 8 :].long()
        return _weighted(words) + _weighted(rest)


def _has(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    return is_plain(tensor) and torch.equal(fingerprint(tensor), expected)


def _weighted(numbers: torch.Tensor) -> torch.Tensor:
    # Odd weights: a change of any single number changes the sum, whatever wraps around.
    weights = torch.arange(numbers.numel(), device=numbers.device) * 2 + 1
    return (numbers * weights).sum()
