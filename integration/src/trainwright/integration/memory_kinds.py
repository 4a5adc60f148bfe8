"""What the memory of a rank holds: bytes of storages, each counted once, by what owns them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.sharding.data import DataParallel, Piece


def state_bytes(
    modules: Iterable[nn.Module],
    pieces: Mapping[str, Piece],
    optimizer: torch.optim.Optimizer,
    is_in_file: Callable[[torch.Tensor], bool] = lambda tensor: False,
    parallel: Iterable[DataParallel] = (),
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer states that this rank holds now.

    A storage counts where it is met first, in this order. Weights are those of the modules as they
    are: what stage 3 has gathered, nothing of what is released, but what it keeps of them beside
    masters in another format. Masters apart from the weights count as optimizer states.

    Args:
        modules: this rank's parts of the model.
        pieces: what the optimizer updates.
        optimizer: whose states.
        is_in_file: says of a tensor that it takes no memory.
        parallel: what shares out the states of the modules.
    """
    held = list(modules)
    parameters = [p for module in held for p in module.parameters()]
    masters = [piece.parameter for piece in pieces.values()]
    buffers = [buffer for module in held for buffer in module.buffers()]
    kinds: dict[str, Iterable[torch.Tensor | None]] = {
        "weights": [*parameters, *buffers],
        "gradients": [p.grad for p in (*parameters, *masters)],
        "optimizer": [*masters, *_states(optimizer)],
    }
    seen: set[tuple[torch.device, int]] = set()
    found = {
        kind: _bytes((t for t in tensors if t is None or not is_in_file(t)), seen)
        for kind, tensors in kinds.items()
    }
    # What is kept in the masters' own format is the masters, which have been counted.
    buckets = [b for each in parallel for unit in each.units.values() for b in unit.buckets]
    kept = (bucket.weights.kept for bucket in buckets)
    found["weights"] += _bytes((t for t in kept if not is_in_file(t)), seen)
    return found


def peak_bytes(device: torch.device) -> int:
    """Return the most memory there was in use since the process began.

    On an accelerator what its allocator gave to tensors, on the CPU the process's resident set,
    interpreter and libraries included.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _bytes(tensors: Iterable[torch.Tensor | None], seen: set[tuple[torch.device, int]]) -> int:
    total = 0
    for tensor in tensors:
        if tensor is None or tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        key = (tensor.device, storage.data_ptr())
        if storage.nbytes() and key not in seen:
            seen.add(key)
            total += storage.nbytes()
    return total


def _states(owner: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer, also of those that it is made of."""
    yield from _tensors(list(owner.state.values()))
    for member in getattr(owner, "members", ()):
        yield from _states(member.optimizer)
    for part, optimizer in getattr(owner, "inner", {}).values():
        yield part
        yield from _states(optimizer)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
