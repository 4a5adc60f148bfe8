"""Counts the bytes of the storages that live in a thread, as operators make and free them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_LOOKS_AT_ALL = 32


class LiveStorages(TorchDispatchMode):
    """Knows every storage that an operator within the block made, until it is freed.

    Storages are resized behind its back, so it looks at all of their sizes now and then, and from
    then on at every operator at those that it has seen change. What other threads make does not
    count, though ranks that are threads read each other's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._resized: set[int] = set()
        self._bytes = 0
        self._looks = 0

    def reset_peak(self) -> None:
        """Let the peak be what lives now."""
        self._measure(list(self._live))
        self.peak_bytes = self._bytes

    def note(self, *tensors: torch.Tensor) -> None:
        """Count the storages of tensors from now on, unless they count already."""
        for tensor in tensors:
            if tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live:
                reference = weakref.ref(storage, functools.partial(self._forget, key))
                self._live[key] = (reference, storage.nbytes())
                self._bytes += storage.nbytes()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count what it makes."""
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        self.note(*(t for t in _tensors(result) if t.untyped_storage()._cdata not in given))
        self._looks += 1
        self._measure(self._live if self._looks % _LOOKS_AT_ALL == 0 else self._resized)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return result

    def _measure(self, keys: Any) -> None:
        for key in list(keys):
            reference, known = self._live.get(key, (lambda: None, 0))
            storage = reference()
            if storage is not None and storage.nbytes() != known:
                self._resized.add(key)
                self._live[key] = (reference, storage.nbytes())
                self._bytes += storage.nbytes() - known

    def _forget(self, key: int, dead: object) -> None:
        _, known = self._live.pop(key)
        self._resized.discard(key)
        self._bytes -= known


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
