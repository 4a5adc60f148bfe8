"""Shared memory as a back end of torch.distributed, for programs that know process groups only."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from trainwright.collectives.errors import UsageError
from trainwright.collectives.rendezvous import Store
from trainwright.collectives.shm.communicator import SharedMemoryCommunicator
from trainwright.collectives.shm.process_group import ShmProcessGroup


def register_backend(name: str = "shm") -> None:
    """Make ``init_process_group(name)`` and ``new_group(backend=name)`` use shared memory.

    The processes must share a host and the tensors be on CPU. Sums are in rank order, in float32 at
    least. Registering again does nothing.

    Args:
        name: in lower case; torch.distributed knows it from now on in this process.

    Raises:
        UsageError: the name belongs to another back end, or is not in lower case.
    """
    if name != name.lower():
        raise UsageError(f"register_backend: torch knows back ends in lower case, got {name!r}")
    known = dist.Backend._plugins.get(name.upper())
    if known is not None and known.creator_fn is _create:
        return
    if name in dist.Backend.backend_list:
        raise UsageError(f"register_backend: {name!r} is another back end; choose another name")
    dist.Backend.register_backend(name, _create, devices=["cpu"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    comm = SharedMemoryCommunicator.from_store(store, rank, size, timeout_s=timeout.total_seconds())
    return ShmProcessGroup(comm)
