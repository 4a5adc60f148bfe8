"""Lets a keeper hold what autograd saves, by saved-tensor hooks."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainwright.checkpointing.errors import PolicyError, ReplayError
from trainwright.checkpointing.protocol import Held, Keeper, LayerRunner

from .measure import SavedBytes, StorageSet, tracker
from .strided import is_part_of_whole, whole_of

_HOLDING: contextvars.ContextVar[Holding | None] = contextvars.ContextVar(
    "trainwright_holding", default=None
)
_Identity = tuple[Any, ...]


class Holding:
    """What a keeper holds during one forward; a tensor that is saved several times is held once.

    Args:
        keeper: Gets every tensor but those ``excluded``.
        excluded: Tensors whose storages stay as they are, such as parameters.
        otherwise: Gets those that are excluded, and what the keeper leaves.
    """

    def __init__(
        self,
        keeper: Keeper,
        excluded: Iterable[torch.Tensor] = (),
        otherwise: Holding | None = None,
    ) -> None:
        self._keeper = keeper
        self._otherwise = otherwise
        self._excluded = StorageSet(excluded)
        self._tracker = tracker()
        # What a codec would make of elements in between, which may be anything, would be spread.
        self._is_lossy = hasattr(keeper, "hold_exactly")
        self._rows: set[tuple[int, ...]] = set()
        # Weak: what is held lives as long as the graph, not as this object.
        self._known: dict[_Identity, tuple[weakref.ref[Any], weakref.ref[_Shared]]] = {}

    def hold(self, tensor: torch.Tensor) -> _Shared | _AsItIs | _View:
        """Return what is kept of ``tensor``."""
        if tensor.layout != torch.strided or tensor.untyped_storage() in self._excluded:
            return self._as_it_is(tensor)
        shape = tuple(tensor.shape)
        # One number for each row of another tensor: an error in it would count for the row.
        is_statistics = shape in self._rows or shape[-1:] == (1,)
        self._rows.add(shape[:-1])
        if is_part_of_whole(tensor, gaps=not self._is_lossy):
            whole = self._hold(whole_of(tensor.detach()), is_statistics)
            return _View(whole, shape, tensor.stride(), int(tensor.storage_offset()))
        return self._hold(tensor, is_statistics)

    def hooks(self) -> saved_tensors_hooks:
        """Return the hooks by which autograd asks."""
        return saved_tensors_hooks(self.hold, _restore)

    def _hold(self, tensor: torch.Tensor, is_statistics: bool) -> _Shared | _AsItIs | _View:
        identity = _identity(tensor)
        known = self._known.get(identity)
        # The number of a storage that is gone may be given to another one.
        if known is not None and known[0]() is not None:
            shared = known[1]()
            if shared is not None:
                return shared
        with torch.no_grad():
            hold = self._keeper.hold
            if is_statistics:
                hold = getattr(self._keeper, "hold_exactly", hold)
            held = hold(tensor.detach())
        if held is None:
            return self._as_it_is(tensor)
        shared = _Shared(held, self._tracker)
        self._known[identity] = (weakref.ref(tensor.untyped_storage()), weakref.ref(shared))
        return shared

    def _as_it_is(self, tensor: torch.Tensor) -> _Shared | _AsItIs | _View:
        if self._otherwise is not None:
            return self._otherwise.hold(tensor)
        if self._tracker is not None:
            self._tracker.note(tensor)
        version = None if tensor.is_inference() else tensor._version
        return _AsItIs(tensor.detach() if tensor.requires_grad else tensor, version)


class _Shared:
    """A held tensor; while one restoration of it lives, no second is made."""

    __slots__ = ("__weakref__", "_held", "_restored", "_tracker")

    def __init__(self, held: Held, counter: SavedBytes | None) -> None:
        self._held = held
        self._tracker = counter
        # By its storage: views of a restored tensor keep that alive, and not the tensor.
        self._restored: tuple[weakref.ref[torch.UntypedStorage], _Identity] | None = None
        if counter is not None:
            counter.note(*held.resident)

    def restore(self) -> torch.Tensor:
        if self._restored is not None:
            storage, (device, dtype, *place) = self._restored[0](), self._restored[1]
            if storage is not None:
                return torch.empty(0, dtype=dtype, device=device).set_(storage, *place)
        with torch.no_grad():
            restored = self._held.restore()
        layout = (restored.storage_offset(), tuple(restored.shape), restored.stride())
        self._restored = (
            weakref.ref(restored.untyped_storage()),
            (restored.device, restored.dtype, *layout),
        )
        if self._tracker is not None:
            self._tracker.note(restored)
        return restored


@attrs.frozen(eq=False)
class _AsItIs:
    """A tensor that was not held; autograd does not watch it, so its version is looked at here."""

    tensor: torch.Tensor
    version: int | None

    def restore(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise ReplayError(
                f"a tensor of shape {list(self.tensor.shape)} that backward needs was modified by "
                "an inplace operation after it was saved, so gradients would be wrong; change a "
                "copy, or finish backward before the update"
            )
        return self.tensor


@attrs.frozen(eq=False)
class _View:
    """A tensor as a part of a held storage."""

    whole: _Shared | _AsItIs | _View
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> torch.Tensor:
        return self.whole.restore().as_strided(self.shape, self.stride, self.offset)


@contextmanager
def holding(keeper: Keeper, excluded: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Let ``keeper`` hold what autograd saves within the block, and what regions in it keep.

    Args:
        keeper: How tensors are kept.
        excluded: Tensors that live on anyway, such as parameters; their storages stay as they are.
    """
    if not isinstance(keeper, Keeper) or isinstance(keeper, type):
        raise PolicyError(f"expected a keeper, such as offload_to_cpu(), got {keeper!r}")
    held = Holding(keeper, excluded)
    token = _HOLDING.set(held)
    try:
        with held.hooks():
            yield
    finally:
        _HOLDING.reset(token)


def current_holding() -> Holding | None:
    """Return what the innermost `holding` block of this thread holds with."""
    return _HOLDING.get()


def parameters_of(layers: Iterable[object]) -> list[torch.Tensor]:
    """Return the parameters and buffers of those that are modules."""
    found: list[torch.Tensor] = []
    for layer in layers:
        if isinstance(layer, nn.Module):
            found += layer.parameters()
            found += layer.buffers()
    return found


@attrs.frozen
class HeldLayers:
    """Runs layers by ``runner``; what that keeps for the backward, ``keeper`` holds.

    With `keep_all` that is all that the layers save, with recomputation the inputs of what is
    recomputed, and the results of operators that a selective policy keeps. Parameters and buffers
    of the layers stay where they are.
    """

    runner: LayerRunner
    keeper: Keeper

    def __call__(self, layers: Iterable[nn.Module], hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last layer, bitwise that of ``runner``."""
        stack = list(layers)
        if not torch.is_grad_enabled():
            return self.runner(stack, hidden, *args, **kwargs)
        with holding(self.keeper, parameters_of(stack)):
            return self.runner(stack, hidden, *args, **kwargs)


def hold_by(runner: LayerRunner, keeper: Keeper) -> HeldLayers:
    """Return ``runner`` with ``keeper`` holding what it keeps; see `HeldLayers`."""
    if not isinstance(keeper, Keeper) or isinstance(keeper, type):
        raise PolicyError(f"expected a keeper, such as offload_to_cpu(), got {keeper!r}")
    return HeldLayers(runner, keeper)


def _restore(kept: _Shared | _AsItIs | _View) -> torch.Tensor:
    return kept.restore()


def _identity(tensor: torch.Tensor) -> _Identity:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        0 if tensor.is_inference() else tensor._version,
    )
