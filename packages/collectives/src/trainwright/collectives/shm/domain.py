"""What one process shares with the others of its host: memory, a bell, and the news of failures.

All groups made from one communicator share a domain. Whoever waits for one operation takes part in
all of the domain's operations, so that groups never wait for each other. A rank looks a few times
for what it waits for, then sleeps on its own bell, which its peers ring after they have written a
flag. A thread sleeps on a second bell, which peers ring when a rank leaves them waiting: it takes
part in its place.
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
from trainwright.collectives.shm.bells import BELL, HELP_BELL, NUM_ASLEEP, help_when_asked, ring
from trainwright.collectives.shm.meeting import Peer
from trainwright.collectives.shm.news import News
from trainwright.collectives.shm.operation import Underway
from trainwright.collectives.shm.segment import Arena, Segment
from trainwright.collectives.shm.system import Fence, Futex, orders_stores

if TYPE_CHECKING:
    from trainwright.collectives.shm.table import Table

_ARENA_START = 1 << 14

_SPIN_S = 50e-6
# How often a rank that shares its core with others looks before it sleeps.
_NUM_LOOKS = 2
# How long a sleeper trusts that it will be woken, before it looks for the dead.
_NAP_S = 0.002
_LONG_NAP_S = 0.02

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
        self._active: list[Underway] = []
        # How often this rank has told the others something: its own progress.
        self._num_told = 0
        self._words = self.own.words
        self._bells = self.bells_of(range(len(segments)))
        self._may_spin = len(segments) <= len(os.sched_getaffinity(0))
        weakref.finalize(self, ring, self._futex, self.own.words, self.own.base, HELP_BELL)
        threading.Thread(
            target=help_when_asked,
            args=(weakref.ref(self), self._futex, self.own),
            name=f"shared memory, rank {rank}",
            daemon=True,
        ).start()

    def launch(self, operation: Underway) -> None:
        """Start an operation and go on with it as far as possible."""
        with self.lock:
            self.check()
            self.start_locked(operation)

    def start_locked(self, operation: Underway) -> None:
        """Do the same for a caller that holds the lock and has found no failure."""
        self._advance_locked(operation)
        if not operation.is_over:
            self.keep_locked(operation)

    def keep_locked(self, operation: Underway) -> None:
        """Go on with an operation whenever this rank waits; the caller holds the lock."""
        self._active.append(operation)

    def wait(self, operation: Underway, timeout_s: float | None) -> None:
        """Return once the operation is over.

        Raises:
            CollectiveTimeoutError: it was not in time; the whole domain has failed.
            PeerFailedError: a rank has failed.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        if not self._pursue(operation, time.monotonic() + timeout_s):
            self._give_up(operation)

    def pursue(self, operation: Underway, within_s: float) -> bool:
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
            if words[NUM_ASLEEP]:
                ring(self._futex, words, base, BELL)

    def help(self) -> None:
        """Take part in all operations."""
        with self.lock:
            self._advance_others_locked(None)

    def _pursue(self, operation: Underway, deadline: float) -> bool:
        is_over: bool | None = None
        while is_over is None:
            if self._linger(operation, deadline):
                return True
            is_over = self._doze(operation, deadline)
        return is_over

    def _linger(self, operation: Underway, deadline: float) -> bool:
        """Look a few times before sleep, which costs more; return whether the operation is over.

        With a core for every rank that is for up to 50 us. Otherwise others get the core between
        two looks: perhaps it is them for whom this rank waits.
        """
        num_told = self._num_told
        looks_left = _NUM_LOOKS
        now = time.monotonic()
        stop = min(now + _SPIN_S, deadline)
        while now < stop and looks_left:
            if not self._may_spin:
                os.sched_yield()
                looks_left -= 1
            with self.lock:
                if self._step_locked(operation):
                    return True
            if self._may_spin:
                now = time.monotonic()
            if self._num_told != num_told:
                # The others answer soon to what they have just been told.
                num_told = self._num_told
                looks_left = _NUM_LOOKS
                stop = min(time.monotonic() + _SPIN_S, deadline)
        return False

    def _doze(self, operation: Underway, deadline: float) -> bool | None:
        """Sleep until rung for, go on as far as possible, and so on.

        Returns:
            Whether the operation was over before the deadline; None if it has gone on a step.
        """
        words = self._words
        num_told = self._num_told
        nap_s = _NAP_S
        with self.lock:
            words[NUM_ASLEEP] += 1
            self.fence()
        try:
            while True:
                with self.lock:
                    # Who rings from here on is heard even before sleep begins.
                    bell = words[BELL]
                    if not self.is_ordered:
                        self.fence()
                    if self._step_locked(operation):
                        return True
                if self._num_told != num_told:
                    return None
                self._hear(operation)
                now = time.monotonic()
                if now >= deadline:
                    return False
                self._futex.wait(self.own.base, bell, min(nap_s, deadline - now))
                if time.monotonic() - now >= nap_s:
                    # Nobody has rung: time to ask for help and to look for the dead.
                    self._miss(operation)
                    nap_s = _LONG_NAP_S
        finally:
            with self.lock:
                words[NUM_ASLEEP] -= 1

    def _miss(self, operation: Underway) -> None:
        """Wake the helpers of those who could go on, and find out who cannot any more."""
        missing = operation.missing()
        for rank in missing:
            segment = self.segments[rank]
            # Whoever waits as well takes part already.
            if not segment.words[NUM_ASLEEP]:
                ring(self._futex, segment.words, segment.base, HELP_BELL)
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

    def _hear(self, operation: Underway) -> None:
        failure = self.news.hear()
        if failure is not None:
            error = failure.error()
            me = self.names[self.rank]
            error.add_note(f"rank {me} was in {operation.what} of {operation.group_name!r}")
            raise error

    def _give_up(self, operation: Underway) -> None:
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
            ring(self._futex, words, base, BELL)

    def _step_locked(self, operation: Underway) -> bool:
        self._advance_locked(operation)
        if not operation.is_over:
            if len(self._active) < 2 or not self._advance_others_locked(operation):
                return False
            self._advance_locked(operation)
        if operation.is_over and operation in self._active:
            self._active.remove(operation)
        return operation.is_over

    def _advance_others_locked(self, operation: Underway | None) -> bool:
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

    def _advance_locked(self, operation: Underway) -> None:
        error = operation.advance()
        if error is not None:
            self._publish(Failure(self.names[self.rank], f"{type(error).__name__}: {error}"))
