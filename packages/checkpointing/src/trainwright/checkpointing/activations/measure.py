"""Counts the bytes that live because a backward needs them: distinct storages, as they come and go.

A storage counts from when a tensor of it is saved until it is freed, whoever holds it last. What is
recomputed, decoded or read back counts as well, from then on. Parameters are left out if given.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_TRACKED: contextvars.ContextVar[SavedBytes | None] = contextvars.ContextVar(
    "trainwright_saved_bytes", default=None
)


class SavedBytes:
    """Live bytes of saved storages; what `measure` counts in.

    Args:
        excluded: Tensors whose storages do not count, such as parameters.
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()) -> None:
        self._excluded = StorageSet(excluded)
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._live_bytes = 0
        self._peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes that live now."""
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that lived at once since the beginning, or since `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Let the peak be what lives now."""
        self._peak_bytes = self._live_bytes

    def note(self, *tensors: torch.Tensor) -> None:
        """Count the storages of ``tensors`` from now on, unless they count already."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue  # has no storage of its own
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._live or storage in self._excluded:
                continue
            size = storage.nbytes()
            self._live[key] = (weakref.ref(storage, functools.partial(self._forget, key)), size)
            self._live_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _forget(self, key: int, dead: object) -> None:
        _, size = self._live.pop(key)
        self._live_bytes -= size


class StorageSet:
    """Storages, told apart while they live; parameters keep theirs even where it is resized.

    Sharded parameters get their storage only when they are gathered, so those without one of their
    size are looked at again.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._without: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._refs[storage._cdata] = weakref.ref(storage)
                if storage.nbytes() < tensor.numel() * tensor.element_size():
                    self._without.append(tensor)

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        found = self._refs.get(storage._cdata)
        if found is not None and found() is not None:
            return True
        for tensor in self._without:
            if tensor.untyped_storage()._cdata == storage._cdata:
                self._refs[storage._cdata] = weakref.ref(storage)
                return True
        return False


@contextmanager
def measure(exclude: Iterable[torch.Tensor] = ()) -> Iterator[SavedBytes]:
    """Count the bytes that forwards within the block save, until they are freed.

    The backward may run within the block or after it. Policies of this package tell what they keep
    themselves; beneath them, tensors that plain PyTorch saves are seen by saved-tensor hooks, so a
    `torch.utils.checkpoint` of one's own is seen as its inputs only. Under these hooks PyTorch does
    not notice that a saved tensor was changed in place. Threads count for themselves.

    Args:
        exclude: Tensors that live on anyway, such as ``model.parameters()``.

    Returns:
        The `SavedBytes`, which counts on after the block.
    """
    tracker = SavedBytes(exclude)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        tracker.note(tensor)
        return tensor.detach() if tensor.requires_grad else tensor

    token = _TRACKED.set(tracker)
    try:
        with saved_tensors_hooks(pack, _as_it_is):
            yield tracker
    finally:
        _TRACKED.reset(token)


def tracker() -> SavedBytes | None:
    """Return the counter of the innermost `measure` block of this thread."""
    return _TRACKED.get()


def counting(counter: SavedBytes | None) -> AbstractContextManager[object]:
    """Count what the hooks that are now in force save, besides letting them do so."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if counter is None or hooks is None:
        return nullcontext()
    save, load = hooks

    def pack(tensor: torch.Tensor) -> object:
        # Hooks of a recomputation keep the tensor itself; they raise once they have all.
        counter.note(tensor)
        return save(tensor)

    return saved_tensors_hooks(pack, load)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
