"""What tensors hold, whatever the allocator of the process keeps beside it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import attrs
import torch
from torch.profiler import ProfilerActivity, profile


@attrs.frozen
class TensorMemory:
    """Bytes in the storages of tensors on the CPU.

    Args:
        lasting: what lives before the work, and so from one step to the next.
        peak: the most while it runs; what other threads allocate meanwhile is not counted.
    """

    lasting: int
    peak: int


def watch(work: Callable[[], object]) -> TensorMemory:
    """Do some work; return what tensors held before it and at most during it."""
    lasting = _alive()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]"
    ]
    held = most = 0
    for _, change in sorted(changes):
        held += change
        most = max(most, held)
    return TensorMemory(lasting, lasting + most)


def _alive() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # isinstance() would wake lazy proxies that libraries keep.
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            for tensor in (found, found.grad if found.is_leaf else None):
                _count(tensor, storages)
    return sum(storages.values())


def _count(tensor: torch.Tensor | None, storages: dict[int, int]) -> None:
    if tensor is None:
        return
    # A DTensor has no memory of its own but that of its local part.
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return  # without storage: fake, functional or sparse
