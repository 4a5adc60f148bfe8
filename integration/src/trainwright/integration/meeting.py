"""How processes that were started as ranks meet: who does not come is named."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as torch_distributed

from trainwright.collectives import CollectiveTimeoutError

# torch tells type checkers nothing of these.
dist: Any = torch_distributed
Store = Any

_HERE = "trainwright/here"
_SAID = "trainwright/said"
_ALL = "all are here"
_NAMED = 8
"""So many of those that are missing are looked for; each costs a question to the store."""

_READING_S = 1.0
_LEAST_S = 0.01
_GRACE_S = 5.0
"""A store that hangs, with the process that serves it, does not even say that it took too long."""


def meet(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the store of all ranks once they are there.

    Where and how is what torchrun's variables say, MASTER_ADDR and MASTER_PORT.

    Args:
        rank: this one.
        world_size: how many there are.
        timeout_s: how long they wait for each other.

    Raises:
        CollectiveTimeoutError: not all came in time; the message names some that did not.
    """
    found: list[Store] = []
    errors: list[BaseException] = []

    def come() -> None:
        try:
            found.append(_come(rank, world_size, timeout_s))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=come, name=f"rank {rank} meets the others", daemon=True)
    thread.start()
    thread.join(timeout_s + _GRACE_S)
    if found:
        return found[0]
    reason = str(errors[0]) if errors else "nothing there answers; its process may be stopped"
    raise CollectiveTimeoutError(
        f"rank {rank} has waited {timeout_s:g} s to meet {world_size} ranks at {_place()}: "
        f"{reason.splitlines()[0]}"
    ) from (errors[0] if errors else None)


def _come(rank: int, world_size: int, timeout_s: float) -> Store:
    # Connecting takes of the same time, so that who is missing is still said within it.
    end = time.monotonic() + timeout_s
    store = _store(rank, timeout_s)
    store.set(f"{_HERE}/{rank}", "1")
    if store.add(_HERE, 1) == world_size:
        store.compare_set(_SAID, "", _ALL)
    try:
        left = max(end - time.monotonic(), _LEAST_S)
        store.wait([_SAID], timedelta(seconds=left))
        said = store.get(_SAID).decode()
    except RuntimeError as error:
        said = _give_up(store, rank, world_size, error)
    if said != _ALL:
        raise TimeoutError(said)
    return store


def _give_up(store: Store, rank: int, world_size: int, error: RuntimeError) -> str:
    """Return who is missing, after telling those who wait on."""
    missing = _missing(store, world_size)
    mine = f"missing: {missing}" if missing else str(error)
    said: str = store.compare_set(_SAID, "", mine).decode()
    if rank == 0:
        # The others read that in a store which ends with this process.
        time.sleep(_READING_S)
    return said


def _store(rank: int, timeout_s: float) -> Store:
    limit = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Served by torchrun, anew for each start of the ranks.
        return next(dist.rendezvous("env://", timeout=limit))[0]
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        rule = "rank 0 must be able to open it" if rank == 0 else "rank 0 must serve it"
        raise TimeoutError(f"{rule}, and {str(error)[:1].lower()}{str(error)[1:]}") from error


def _missing(store: Store, world_size: int) -> str:
    missing: list[str] = []
    for rank in range(world_size):
        if not store.check([f"{_HERE}/{rank}"]):
            missing.append(f"rank {rank}")
        if len(missing) == _NAMED:
            return ", ".join(missing) + ", perhaps more"
    return ", ".join(missing)


def _place() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
