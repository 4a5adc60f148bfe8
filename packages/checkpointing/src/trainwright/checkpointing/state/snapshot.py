"""Private copies of a state, in host memory that is kept from one snapshot to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .tree import Leaves, Sharded, TensorLeaf, Tree

_Key = tuple[object, ...]


class SnapshotBuffers:
    """Copies states one at a time: a snapshot is good until the next one is taken.

    The memory is that of one snapshot. It is allocated by the first one and used again, since
    fresh memory costs several times what the copy costs. What comes from a GPU lies in pinned
    memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(
        self, tree: Tree, leaves: Leaves, is_needed: Callable[[TensorLeaf], bool]
    ) -> dict[str, Any]:
        """Return a tree that no later change of ``tree``, its tensors or its lists reaches.

        Tensors that are one memory in ``tree`` are one in the copy.

        Args:
            tree: The state.
            leaves: Its leaves.
            is_needed: Whose elements to copy; of others only shape and dtype are kept.
        """
        shot = _Shot(self._buffers, leaves.tensors, is_needed)
        result = shot.copy_tree(tree, "")
        self._buffers = shot.used
        for device in shot.devices:
            torch.cuda.current_stream(device).synchronize()
        return result

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers = {}


class _Shot:
    def __init__(
        self,
        buffers: dict[str, torch.Tensor],
        leaves: Mapping[str, TensorLeaf],
        is_needed: Callable[[TensorLeaf], bool],
    ) -> None:
        self._buffers = buffers
        self._leaves = leaves
        self._is_needed = is_needed
        self._copies: dict[_Key, torch.Tensor] = {}
        self.used: dict[str, torch.Tensor] = {}
        self.devices: set[torch.device] = set()

    def copy_tree(self, tree: Tree, prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in tree.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                result[key] = self.copy_tree(value, f"{path}/")
            elif isinstance(value, Sharded):
                result[key] = Sharded(self._copy(path, value.tensor), value.spec)
            elif isinstance(value, torch.Tensor):
                result[key] = self._copy(path, value)
            else:
                result[key] = copy.deepcopy(value)
        return result

    def _copy(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        is_needed = self._is_needed(self._leaves[path])
        key = (*_memory(tensor), is_needed)
        kept = self._copies.get(key)
        if kept is None or tensor.numel() == 0:
            kept = torch.empty((), dtype=tensor.dtype)  # stands for one that nobody reads
            if is_needed:
                kept = self._fill(path, tensor.detach())
            self._copies[key] = kept
        return kept.view(tensor.shape) if is_needed else kept.expand(tensor.shape)

    def _fill(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        is_on_gpu = tensor.device.type == "cuda"
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.dtype, buffer.numel()) != (tensor.dtype, tensor.numel()):
            buffer = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=is_on_gpu)
        buffer.view(tensor.shape).copy_(tensor, non_blocking=is_on_gpu)
        if is_on_gpu:
            self.devices.add(tensor.device)
        self.used[path] = buffer
        return buffer


def _memory(tensor: torch.Tensor) -> _Key:
    """Return what tells whether two tensors are the same elements in the same memory."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    if tensor.is_contiguous():
        return (*place, tensor.numel())
    return (*place, tensor.shape, tensor.stride())
