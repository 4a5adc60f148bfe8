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
            self._of_forward.append(_fingerprint(tensor))
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
            if before is not None:
                now = _fingerprint(tensor)
                if now is None or not torch.equal(now, before):
                    raise ReplayError(
                        f"saved tensor {number} of shape {list(tensor.shape)} has other values in "
                        "the recomputation than in the forward; what it depends on (random numbers "
                        "of Python, numpy or a hidden generator, a global, a kernel that is not "
                        "deterministic) is not replayed: capture it, decide_once, or keep the layer"
                    )
            return save(tensor)

        return saved_tensors_hooks(pack, load)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor | None:
    if not is_plain(tensor):
        return None
    with torch.no_grad():
        elements = Strided.of(tensor).take(tensor.detach()).reshape(-1).view(torch.uint8)
        words = elements[: elements.numel() // 8 * 8].clone().view(torch.int64)
        places = torch.arange(words.numel(), device=words.device) * 2 + 1
        rest = elements[words.numel() * 8 :].long()
        places_of_rest = torch.arange(rest.numel(), device=rest.device) + 1
        return (words * places).sum() + (rest * places_of_rest).sum()
