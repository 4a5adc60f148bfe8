"""A group of ranks that share memory, as the transport below the checking front."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from trainwright.collectives.background import within
from trainwright.collectives.calls import Call, Kind, members_by_color
from trainwright.collectives.errors import CollectiveTimeoutError
from trainwright.collectives.protocol import Recv, Send, Work
from trainwright.collectives.rendezvous import GRACE_S, Store
from trainwright.collectives.shm.domain import Domain
from trainwright.collectives.shm.mail import Mail, mail_bytes
from trainwright.collectives.shm.meeting import meet
from trainwright.collectives.shm.operation import Operation, ShmWork
from trainwright.collectives.shm.quick import Quick
from trainwright.collectives.shm.segment import Segment
from trainwright.collectives.shm.steps import take_part
from trainwright.collectives.shm.table import TABLE_BYTES, Table
from trainwright.collectives.single import compute_alone
from trainwright.collectives.works import DONE, JoinedWork


class ShmBackend:
    """One rank's end of a group of processes that share memory.

    Args:
        domain: the memory of all.
        rank: this rank in the group.
        ranks: the group's ranks, counted in the domain.
        places: where each rank has the table and the letters of this group, in 64-bit numbers.
        name: for messages.
    """

    def __init__(
        self,
        domain: Domain,
        rank: int,
        ranks: Sequence[int],
        places: Sequence[int],
        name: str,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.device = torch.device("cpu")
        self.name = name
        self.ranks = tuple(ranks)
        self.domain = domain
        self.segments: list[Segment] = [domain.segments[member] for member in self.ranks]
        self.table = Table(domain, rank, self.ranks, places, name)
        mail_places = [place + TABLE_BYTES // 8 for place in places]
        self._mail = Mail(domain, rank, self.ranks, mail_places, name)
        self._quick = Quick(self)
        self._num_started = 0
        self._num_splits = 0
        self._blocks: deque[tuple[int, int, int]] = deque()

    def start(self, call: Call) -> Work:
        """Show this rank's part to the others, and go on as far as they have come."""
        if self.size == 1:
            self.domain.check()
            compute_alone(call)
            return DONE
        number = call.number = self._num_started
        self._num_started = number + 1
        work = self._quick.start(call, number)
        if work is not None:
            return work
        output = call.output
        operation = Operation(
            call,
            self.name,
            take_part(self, call, number),
            partial(self.table.missing, number),
            output is not None and output.is_inference(),
        )
        self.domain.launch(operation)
        if operation.is_over and operation.error is None:
            return DONE
        return ShmWork(self.domain, operation, call.timeout_s)

    def exchange(self, messages: Sequence[Send | Recv], timeout_s: float | None) -> Work:
        """Start the receives, then the sends."""
        works = [
            ShmWork(self.domain, self._mail.post(message), timeout_s)
            for kind in (Recv, Send)
            for message in messages
            if isinstance(message, kind)
        ]
        return works[0] if len(works) == 1 else JoinedWork(works)

    def start_together(self, pending: Sequence[Call | Sequence[Send | Recv]]) -> list[Work]:
        """Start one after the other: starting never waits for a peer."""
        return [
            self.start(item) if isinstance(item, Call) else self.exchange(item, None)
            for item in pending
        ]

    def split(self, color: int | None, key: int) -> ShmBackend | None:
        """Exchange colors, keys and the places of new tables; the memory is there already."""
        label = self._num_splits
        self._num_splits += 1
        if self.size == 1:
            self.domain.check()
            name = f"{self.name}/{label}.{color}"
            return None if color is None else ShmBackend(self.domain, 0, self.ranks, (0,), name)
        place = reserve(self.domain, self.size)
        mine = torch.tensor([[0 if color is None else 1, color or 0, key, place]])
        rows = torch.empty((self.size, 4), dtype=torch.int64)
        self.start(Call(Kind.ALL_GATHER, rows, mine, (1, 4), mine.dtype)).wait()
        if color is None:
            return None
        table: list[list[int]] = rows.tolist()
        order = members_by_color([row[:3] for row in table])[color]
        return ShmBackend(
            self.domain,
            order.index(self.rank),
            [self.ranks[rank] for rank in order],
            [table[rank][3] for rank in order],
            f"{self.name}/{label}.{color}",
        )

    def abort(self, cause: str) -> None:
        """Tell all ranks of the domain, not this group alone."""
        self.domain.abort(cause)

    def take(self, number: int, num_bytes: int) -> int:
        """Return the offset of a block that comes back when all have finished the collective."""
        offset = self.domain.arena.take(num_bytes)
        self._blocks.append((number, offset, num_bytes))
        return offset

    def release(self, number: int) -> None:
        """Take back the block of a collective in which nobody reads or writes any more."""
        for entry in self._blocks:
            if entry[0] == number:
                self._blocks.remove(entry)
                self.domain.arena.give_back(*entry[1:])
                return

    def collect(self) -> None:
        """Reuse the blocks of collectives that all have finished, this rank too.

        Where the others have finished, answers to this rank may still lie in its block.
        """
        blocks = self._blocks
        while blocks and self.table.is_over(blocks[0][0]):
            _, offset, num_bytes = blocks.popleft()
            self.domain.arena.give_back(offset, num_bytes)


def connect(
    store: Store, rank: int, names: Sequence[int], timeout_s: float, name: str
) -> ShmBackend:
    """Make the group of all processes that meet in the store; all of them call together.

    Args:
        store: a part of a store for these ranks only.
        rank: this process.
        names: the processes' numbers in the world, for messages and errors.
        timeout_s: how long to wait for peers, now and in every operation.
        name: the group, for messages.

    Raises:
        NotAvailableError: the ranks do not share a host, or this is no Linux.
        CollectiveTimeoutError: not all came; the message names the others.
    """
    size = len(names)
    what = f"{name!r}: shared memory: rank {names[rank]}, meeting the others,"
    try:
        met = within(timeout_s + GRACE_S, partial(meet, store, rank, size, timeout_s), what)
    except CollectiveTimeoutError:
        raise
    except TimeoutError as error:
        raise CollectiveTimeoutError(f"{error}: the store does not answer") from error
    segments, peers = met
    domain = Domain(segments, peers, rank, names, timeout_s)
    # Everybody's first block lies at the same place.
    place = reserve(domain, size)
    return ShmBackend(domain, rank, range(size), [place] * size, name)


def reserve(domain: Domain, size: int) -> int:
    """Return the index of fresh zeros for the table and letters of a group of up to ``size``."""
    return domain.arena.take_zeros(TABLE_BYTES + mail_bytes(size)) // 8
