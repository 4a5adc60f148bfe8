"""How rank threads sleep until another rank has something for them, without polling."""

from __future__ import annotations

import sys
import threading
import time
import traceback

from trainwright.collectives.background import Bystander
from trainwright.collectives.errors import CollectiveError, CollectiveTimeoutError, PeerFailedError

Failure = tuple[type[CollectiveError], str]


class Pending:
    """Something ranks may wait for, a collective or a message; guarded by the world's mutex."""

    __slots__ = ("error", "parked", "ready")

    def __init__(self) -> None:
        self.ready = False
        self.error: Failure | None = None
        self.parked: list[threading.Lock] = []

    def is_over(self) -> bool:
        """Whether it is done or has failed."""
        return self.ready

    def describe(self) -> str:
        """Say what it is, and who is missing."""
        raise NotImplementedError


class _Sleeper:
    __slots__ = ("deadline", "pending", "rank", "verdict")

    def __init__(self, rank: int, pending: Pending, deadline: float) -> None:
        self.rank = rank
        self.pending = pending
        self.deadline = deadline
        self.verdict: str | None = None


class ThreadWorld:
    """What the rank threads of one run share: the mutex, the sleepers, the first failure."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.mutex = threading.Lock()
        self.failure: tuple[int, str] | None = None
        self.threads: list[threading.Thread] = []
        self.settled = threading.Lock()
        self.settled.acquire()
        self._num_running = size
        self._sleepers: dict[threading.Lock, _Sleeper] = {}
        self._caller = threading.current_thread()

    def check(self) -> None:
        """Raise if a rank has failed."""
        if self.failure is not None:
            raise PeerFailedError(*self.failure)

    def sleep(self, pending: Pending, rank: int, timeout_s: float | None) -> None:
        """Sleep until someone touches ``pending``; the caller looks whether it is ready.

        Raises:
            PeerFailedError: a rank failed meanwhile.
            CollectiveTimeoutError: nothing happened in time, or nothing can happen any more.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        lock = threading.Lock()
        lock.acquire()
        sleeper = _Sleeper(rank, pending, time.monotonic() + timeout_s)
        with self.mutex:
            if pending.is_over():
                return
            self.check()
            pending.parked.append(lock)
            self._sleepers[lock] = sleeper
            self._expire_if_stuck()
        woken = lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        if woken and pending.is_over():
            return
        with self.mutex:
            self._sleepers.pop(lock, None)
            if pending.is_over():
                return
            self.check()
            if woken and sleeper.verdict is None:
                return
            verdict = sleeper.verdict
            if verdict is None:
                verdict = f"rank {rank} gave up after {timeout_s} s on {pending.describe()}"
        self.finish(pending, (CollectiveTimeoutError, f"{verdict}\n{self.stacks()}"))

    def finish(self, pending: Pending, error: Failure | None = None) -> None:
        """Mark as ready and wake whoever sleeps on it."""
        with self.mutex:
            self.finish_locked(pending, error)

    def finish_locked(self, pending: Pending, error: Failure | None = None) -> None:
        """Do the same for a caller that holds the mutex."""
        if pending.ready:
            return
        pending.error = error
        pending.ready = True
        self.wake_locked(pending)

    def wake_locked(self, pending: Pending) -> None:
        """Wake whoever sleeps on it, ready or not."""
        for lock in pending.parked:
            if self._sleepers.pop(lock, None) is not None:
                lock.release()
        pending.parked.clear()

    def fail(self, rank: int, cause: str) -> None:
        """Record the first failure and wake everybody."""
        with self.mutex:
            if self.failure is not None:
                return
            self.failure = (rank, cause)
            for lock in self._sleepers:
                lock.release()
            self._sleepers.clear()
            self._settle()

    def leave(self) -> None:
        """Count out a rank whose function has ended."""
        with self.mutex:
            self._num_running -= 1
            if self._num_running == 0:
                self._settle()
            else:
                self._expire_if_stuck()

    def stacks(self) -> str:
        """Show where every rank thread stands."""
        frames = sys._current_frames()
        lines = []
        for rank, thread in enumerate(self.threads):
            frame = frames.get(thread.ident or -1) if thread.is_alive() else None
            lines.append(f"--- stack of rank {rank}" + ("" if frame else ": has ended"))
            if frame:
                lines.append("".join(traceback.format_stack(frame)).rstrip())
        return "\n".join(lines)

    def _settle(self) -> None:
        if self.settled.locked():
            self.settled.release()

    def _expire_if_stuck(self) -> None:
        # Once all ranks sleep, only a thread unknown to us could still wake one; without any, the
        # earliest deadline is the next thing that can happen, so it may as well happen now.
        if len(self._sleepers) < self._num_running or not self._sleepers:
            return
        known = {self._caller, *self.threads}
        others = [thread for thread in threading.enumerate() if thread not in known]
        if not all(isinstance(thread, Bystander) for thread in others):
            return
        waiting = sorted(self._sleepers.values(), key=lambda sleeper: sleeper.rank)
        lock, sleeper = min(self._sleepers.items(), key=lambda item: item[1].deadline)
        del self._sleepers[lock]
        sleeper.verdict = "deadlock, every rank waits or has returned:" + "".join(
            f"\nrank {other.rank} waits in {other.pending.describe()}" for other in waiting
        )
        lock.release()
