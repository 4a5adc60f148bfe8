"""Private copies of a state, in host memory that is kept from one snapshot to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable

import attrs
import torch

from .tree import Leaves, TensorLeaf

_Key = tuple[object, ...]


class SnapshotBuffers:
    """Copies states one at a time: a snapshot is good until the next one is taken.

    The memory is that of one snapshot. It is allocated by the first one and used again, since
    fresh memory costs several times what the copy costs. What comes from a GPU lies in pinned
    memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, leaves: Leaves, is_needed: Callable[[TensorLeaf], bool]) -> Leaves:
        """Return leaves that no later change of the user's tensors and values reaches.

        Tensors that are one memory in ``leaves`` are one in the copy.

        Args:
            leaves: The state.
            is_needed: Whose elements to copy; of others only shape and dtype are kept.
        """
        shot = _Shot(self._buffers)
        # The memory outlives the mode of this call.
        with torch.inference_mode(False), torch.no_grad():
            tensors = {
                path: attrs.evolve(leaf, tensor=shot.copy(path, leaf.tensor, is_needed(leaf)))
                for path, leaf in leaves.tensors.items()
            }
        self._buffers = shot.used
        for device in shot.devices:
            torch.cuda.current_stream(device).synchronize()
        return Leaves(tensors, copy.deepcopy(leaves.plain))

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers = {}


class _Shot:
    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        self._buffers = buffers
        self._copies: dict[_Key, torch.Tensor] = {}
        self.used: dict[str, torch.Tensor] = {}
        self.devices: set[torch.device] = set()

    def copy(self, path: str, tensor: torch.Tensor, is_needed: bool) -> torch.Tensor:
        key = (*_memory(tensor), is_needed)
        kept = self._copies.get(key)
        if kept is None or tensor.numel() == 0:
            # Stands for one that nobody reads.
            kept = torch.empty((), dtype=tensor.dtype, device="cpu")
            if is_needed:
                kept = self._fill(path, tensor.detach())
            self._copies[key] = kept
        return kept.view(tensor.shape) if is_needed else kept.expand(tensor.shape)

    def _fill(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        is_on_gpu = tensor.device.type == "cuda"
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.dtype, buffer.numel()) != (tensor.dtype, tensor.numel()):
            buffer = torch.empty(
                tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=is_on_gpu
            )
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
