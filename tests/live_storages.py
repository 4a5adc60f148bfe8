"""Counts the bytes of the storages that live in a thread, as operators make and free them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveStorages(TorchDispatchMode):
    """Knows every storage that an operator within the block made, until it is freed.

    Sizes are read again at each operator, since storages are resized behind its back. What other
    threads make does not count, though ranks that are threads read each other's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.at_peak: dict[int, int] = {}
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live_bytes(self) -> int:
        """Bytes that live now."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that lives, by its address."""
        found = {}
        for key, reference in list(self._live.items()):
            storage = reference()
            if storage is None:
                self._live.pop(key, None)
            else:
                found[key] = storage.nbytes()
        return found

    def reset_peak(self) -> None:
        """Let the peak be what lives now."""
        self.peak_bytes = 0
        self.look()

    def note(self, *tensors: torch.Tensor) -> None:
        """Count the storages of tensors that were made elsewhere."""
        for tensor in tensors:
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = weakref.ref(storage)

    def look(self) -> None:
        """Take what lives now into the peak."""
        live = self.live_bytes
        if live > self.peak_bytes:
            self.peak_bytes = live
            self.at_peak = self.sizes()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count what it returns."""
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        self.note(*(t for t in _tensors(result) if t.untyped_storage()._cdata not in given))
        self.look()
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
