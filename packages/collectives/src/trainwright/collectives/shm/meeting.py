"""How the processes of a host find each other's memory."""

from __future__ import annotations

import json
import os
import time

import attrs

from trainwright.collectives.errors import CollectiveTimeoutError
from trainwright.collectives.rendezvous import Store
from trainwright.collectives.shm.segment import Segment, capacity, create_file
from trainwright.collectives.shm.system import NotAvailableError, host_identity

_POLL_S = 0.005


@attrs.frozen
class Peer:
    """Another process; ``process`` is a descriptor that becomes readable when it ends."""

    rank: int
    process: int


@attrs.frozen
class Card:
    """What a process tells of itself."""

    pid: int
    file: int
    num_bytes: int
    host: str

    def open(self, rank: int) -> tuple[Segment, Peer]:
        """Open the memory of the process that wrote the card."""
        try:
            process = os.pidfd_open(self.pid)
            file = os.open(f"/proc/{self.pid}/fd/{self.file}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotAvailableError(
                f"the memory of rank {rank} (process {self.pid}) cannot be opened: {error}; "
                "processes must run as the same user and see each other in /proc"
            ) from error
        try:
            return Segment(file, self.num_bytes), Peer(rank, process)
        except OSError as error:
            raise NotAvailableError(
                f"the memory of rank {rank} cannot be mapped: {error}; raise the limit on address "
                "space (ulimit -v)"
            ) from error
        finally:
            os.close(file)


def meet(store: Store, rank: int, size: int, timeout_s: float) -> tuple[list[Segment], list[Peer]]:
    """Open the memory of every rank; all of them call together.

    Args:
        store: a part of a store for these ranks only.
        rank: this process.
        size: the number of processes.
        timeout_s: how long to wait for the others.

    Raises:
        NotAvailableError: the ranks do not share a host, or this is no Linux.
        CollectiveTimeoutError: not all came; the message names the others.
    """
    num_bytes = capacity(size)
    file = create_file(num_bytes)
    try:
        own = Segment(file, num_bytes)
        card = Card(os.getpid(), file, num_bytes, host_identity())
        store.set(f"card/{rank}", json.dumps(attrs.asdict(card)))
        _await_all(store, "card", size, timeout_s)
        cards = [Card(**json.loads(store.get(f"card/{other}"))) for other in range(size)]
        _check_hosts(cards)
        opened = [card.open(other) for other, card in enumerate(cards) if other != rank]
        # The file must stay open until everybody has it.
        store.set(f"opened/{rank}", "1")
        _await_all(store, "opened", size, timeout_s)
    finally:
        os.close(file)
    segments = [segment for segment, _ in opened]
    segments.insert(rank, own)
    return segments, [peer for _, peer in opened]


def _await_all(store: Store, what: str, size: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(range(size))
    while waiting := [rank for rank in waiting if not store.check([f"{what}/{rank}"])]:
        if time.monotonic() > deadline:
            raise CollectiveTimeoutError(
                f"shared memory: not all of {size} ranks came within {timeout_s} s; missing: "
                f"{waiting}. All of them must make the communicator"
            )
        time.sleep(_POLL_S)


def _check_hosts(cards: list[Card]) -> None:
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    if len(hosts) > 1:
        raise NotAvailableError(
            f"the ranks {list(hosts.values())} do not share a host, a user and a view of its "
            "processes; shared memory connects those of one host: split the group by host, and "
            "use TorchCommunicator between hosts"
        )
