"""Buffers of a module that a forward changes: a recomputation sees them as they were, and its
changes are thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import attrs
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainwright.checkpointing.errors import ReplayError

# A buffer of at most so many bytes is remembered in any case, a larger one if it was changed.
_SMALL = 1 << 16


@attrs.define(eq=False)
class _Buffer:
    owner: nn.Module
    name: str
    path: str
    tensor: torch.Tensor
    version: int
    before: torch.Tensor | None


class Buffers:
    """The buffers of some modules as they are before a forward.

    Args:
        modules: Names and modules; each is looked at with all modules in it.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._buffers: list[_Buffer] = []
        self._others: list[tuple[nn.Module, str]] = []
        for prefix, module in modules:
            for path, owner in module.named_modules(prefix=prefix):
                for name, tensor in owner._buffers.items():
                    if tensor is None:
                        self._others.append((owner, name))
                    else:
                        self._buffers.append(_remember(owner, name, f"{path}.{name}", tensor))

    def forget_unchanged(self) -> None:
        """Note that the forward has ended: large buffers that it left alone need no copy."""
        for each in self._buffers:
            if each.before is not None and not _is_small(each.tensor) and not _is_changed(each):
                each.before = None

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Let the modules have buffers as before the forward; afterwards those of now again.

        Raises:
            ReplayError: A large buffer, which the forward did not change, was changed since.
        """
        now = [
            (each.owner, each.name, each.owner._buffers.get(each.name)) for each in self._buffers
        ]
        now += [(owner, name, owner._buffers.get(name)) for owner, name in self._others]
        for each in self._buffers:
            if not _is_changed(each) and each.owner._buffers[each.name] is each.tensor:
                continue
            if each.before is None:
                raise ReplayError(
                    f"buffer {each.path} was changed between the forward and its recomputation, "
                    "which did not begin with it; finish backward before the change, or keep this "
                    "layer's activations"
                )
            each.owner._buffers[each.name] = each.before.clone()
        for owner, name in self._others:
            owner._buffers[name] = None
        try:
            yield
        finally:
            for owner, name, tensor in now:
                owner._buffers[name] = tensor


def _remember(owner: nn.Module, name: str, path: str, tensor: torch.Tensor) -> _Buffer:
    version = 0 if tensor.is_inference() else tensor._version
    with torch.no_grad():
        return _Buffer(owner, name, path, tensor, version, tensor.detach().clone())


def _is_changed(buffer: _Buffer) -> bool:
    tensor = buffer.tensor
    if not tensor.is_inference() and tensor._version != buffer.version:
        return True
    # Kernels of batch norm write statistics without counting a version.
    owner = buffer.owner
    if isinstance(owner, _NormBase) and owner.training and owner.track_running_stats:
        return True
    return owner._buffers.get(buffer.name) is not tensor


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL
