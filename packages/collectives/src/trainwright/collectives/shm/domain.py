"""What one process shares with the others of its host: memory, a bell, and the news of failures.

All groups made from one communicator share a domain. Whoever waits for one operation takes part in
all of the domain's operations, so that groups never wait for each other. A rank sleeps on its own
bell, which its peers ring after they have written a flag. A thread sleeps on a second bell, which
peers ring when a rank leaves them waiting: it takes part in its place.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trainwright.collectives.arithmetic import Combiner
from trainwright.collectives.errors import CollectiveTimeoutError
from trainwright.collectives.failures import Failure
from trainwright.collectives.shm.meeting import Peer
from trainwright.collectives.shm.news import News
from trainwright.collectives.shm.operation import Operation
from trainwright.collectives.shm.segment import Arena, Segment
from trainwright.collectives.shm.system import Fence, Futex, orders_stores

if TYPE_CHECKING:
    from trainwright.collectives.shm.table import Table

# The places of 64-bit numbers at the start of every segment, on cache lines of their own.
_BELL = 0
_NUM_ASLEEP = 1
_HELP_BELL = 16
_ARENA_START = 1 << 14

_SPIN_S = 50e-6
# How long a sleeper trusts that it will be woken, before it looks for the dead.
_NAP_S = 0.002
_LONG_NAP_S = 0.02
_HELPER_NAP_S = 5.0
_MASK = 0xFFFFFFFF

Bells = list[tuple[memoryview, int]]


class Domain:
    """One process's hold on the memory of all.

    Args:
        segments: the memory of every rank, this one's own among them.
        peers: the other processes.
        rank: this process.
        names: what the ranks are called in messages and errors: their numbers in the world.
        timeout_s: how long operations wait for peers.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        peers: Sequence[Peer],
        rank: int,
        names: Sequence[int],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.names = tuple(names)
        self.segments = tuple(segments)
        self.own = segments[rank]
        self.timeout_s = timeout_s
        self.arena = Arena(self.own, _ARENA_START)
        self.lock = threading.Lock()
        self.fence = Fence()
        self.combiner = Combiner()
        self.is_ordered = orders_stores()
        self.news = News(self.segments, peers, rank)
        # By the names of their groups.
        self.tables: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()
        self._futex = Futex()
        self._active: list[Operation] = []
        # How often this rank has told the others something: its own progress.
        self._num_told = 0
        self._words = self.own.words
        self._bells = self.bells_of(range(len(segments)))
        self._may_spin = len(segments) <= len(os.sched_getaffinity(0))
        weakref.finalize(self, _ring, self._futex, self.own.words, self.own.base, _HELP_BELL)
        threading.Thread(
            target=_help,
            args=(weakref.ref(self), self._futex, self.own),
            name=f"shared memory, rank {rank}",
            daemon=True,
        ).start()

    def launch(self, operation: Operation) -> None:
        """Start an operation and go on with it as far as possible."""
        with self.lock:
            self.check()
            self.start_locked(operation)

    def start_locked(self, operation: Operation) -> None:
        """Do the same for a caller that holds the lock and has found no failure."""
        self._advance_locked(operation)
        if not operation.is_over:
            self._active.append(operation)

    def wait(self, operation: Operation, timeout_s: float | None) -> None:
        """Return once the operation is over.

        Raises:
            CollectiveTimeoutError: it was not in time; the whole domain has failed.
            PeerFailedError: a rank has failed.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._pursue(operation, time.monotonic() + timeout_s):
            self._give_up(operation)

    def pursue(self, operation: Operation, within_s: float) -> bool:
        """Return whether the operation is over, or would raise, within some seconds."""
        try:
            return self._pursue(operation, time.monotonic() + within_s)
        except Exception:
            return True

    def check(self) -> None:
        """Raise if a rank has failed."""
        failure = self.news.hear()
        if failure is not None:
            raise failure.error()

    def abort(self, cause: str) -> None:
        """Tell the peers that this rank gives up."""
        self._publish(Failure(self.names[self.rank], cause))

    def bells_of(self, ranks: Iterable[int]) -> Bells:
        """Return what rings for those of some ranks that are not this one."""
        segments = [self.segments[rank] for rank in ranks if rank != self.rank]
        return [(segment.words, segment.base) for segment in segments]

    def progress(self) -> None:
        """Show the flags that this rank has written; the caller holds the lock."""
        self.fence()
        self._num_told += 1

    def ring(self, bells: Bells | None = None) -> None:
        """Wake the peers that sleep, all unless told which; the caller holds the lock."""
        self.progress()
        for words, base in self._bells if bells is None else bells:
            if words[_NUM_ASLEEP]:
                _ring(self._futex, words, base, _BELL)

    def help(self) -> None:
        """Take part in all operations."""
        with self.lock:
            self._advance_others_locked(None)

    def _pursue(self, operation: Operation, deadline: float) -> bool:
        spin_until = 0.0
        num_told = -1
        nap_s = _NAP_S
        while True:
            with self.lock:
                if self._step_locked(operation):
                    return True
            now = time.monotonic()
            if self._may_spin and self._num_told != num_told:
                # The others answer soon to what they have just been told.
                num_told = self._num_told
                spin_until = now + _SPIN_S
            if now < spin_until and now < deadline:
                continue
            self._hear(operation)
            if now >= deadline:
                return False
            if self._nap(operation, min(nap_s, deadline - now)):
                return True
            if time.monotonic() - now >= nap_s:
                # Nobody has rung: time to ask for help and to look for the dead.
                self._miss(operation)
                nap_s = _LONG_NAP_S

    def _nap(self, operation: Operation, seconds: float) -> bool:
        words = self._words
        with self.lock:
            words[_NUM_ASLEEP] += 1
            self.fence()
            bell = words[_BELL]
            if self._step_locked(operation):
                words[_NUM_ASLEEP] -= 1
                return True
        self._futex.wait(self.own.base, bell, seconds)
        with self.lock:
            words[_NUM_ASLEEP] -= 1
        return False

    def _miss(self, operation: Operation) -> None:
        """Wake the helpers of those who could go on, and find out who cannot any more."""
        missing = operation.missing()
        for rank in missing:
            segment = self.segments[rank]
            _ring(self._futex, segment.words, segment.base, _HELP_BELL)
        dead = self.news.dead()
        if not dead:
            return
        with self.lock:
            # What the dead have left behind counts.
            if self._step_locked(operation):
                return
        for rank in sorted(dead.intersection(operation.missing())):
            self._hear(operation)
            cause = f"its process has ended during {operation.what} in {operation.group_name!r}"
            self._publish(Failure(self.names[rank], cause))

    def _hear(self, operation: Operation) -> None:
        failure = self.news.hear()
        if failure is not None:
            error = failure.error()
            me = self.names[self.rank]
            error.add_note(f"rank {me} was in {operation.what} of {operation.group_name!r}")
            raise error

    def _give_up(self, operation: Operation) -> None:
        missing = ", ".join(f"rank {self.names[rank]}" for rank in operation.missing())
        me = self.names[self.rank]
        cause = (
            f"rank {me} gave up on {operation.what} in {operation.group_name!r}; missing: "
            f"{missing}. They have not started it, or called something else before"
        )
        table = self.tables.get(operation.group_name)
        if table is not None:
            cause += f"; {table.describe_progress()}"
        self._publish(Failure(me, cause, is_timeout=True))
        self._hear(operation)
        raise CollectiveTimeoutError(cause)

    def _publish(self, failure: Failure) -> None:
        self.news.publish(failure)
        for words, base in self._bells:
            _ring(self._futex, words, base, _BELL)

    def _step_locked(self, operation: Operation) -> bool:
        self._advance_locked(operation)
        if not operation.is_over and self._advance_others_locked(operation):
            self._advance_locked(operation)
        if operation.is_over and operation in self._active:
            self._active.remove(operation)
        return operation.is_over

    def _advance_others_locked(self, operation: Operation | None) -> bool:
        """Return whether one of them has ended."""
        if len(self._active) < 2 and operation in self._active:
            return False
        for other in self._active:
            if other is not operation:
                self._advance_locked(other)
        left = [other for other in self._active if not other.is_over or other is operation]
        has_ended = len(left) < len(self._active)
        self._active = left
        return has_ended

    def _advance_locked(self, operation: Operation) -> None:
        error = operation.advance()
        if error is not None:
            self._publish(Failure(self.names[self.rank], f"{type(error).__name__}: {error}"))


def _ring(futex: Futex, words: memoryview, base: int, place: int) -> None:
    words[place] = (words[place] + 1) & _MASK
    futex.wake(base + 8 * place)


def _help(owner: weakref.ref[Domain], futex: Futex, own: Segment) -> None:
    """Help whenever a peer asks for it, as long as the domain exists."""
    while True:
        bell = own.words[_HELP_BELL]
        domain = owner()
        if domain is None:
            return
        domain.help()
        del domain
        futex.wait(own.base + 8 * _HELP_BELL, bell, _HELPER_NAP_S)
