"""How the processes of a world learn that one of them has given up, and why."""

from __future__ import annotations

import contextlib
import functools
import json
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from trainwright.collectives.background import all_of, within
from trainwright.collectives.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    UsageError,
)
from trainwright.collectives.rendezvous import Store

_KEY = "failure"

# A rank that gives up may close its connections a moment before it has said why.
_NOTE_S = 1.0
# How long the store gets to answer. Where its process is stopped, or the way to it cut, no answer
# comes, and whoever has to tell of that must not wait for one.
_STORE_S = 3.0


@attrs.frozen
class Failure:
    """The first failure of a world; ``rank`` counts in the world."""

    rank: int
    cause: str
    is_timeout: bool = False
    is_disagreement: bool = False

    def error(self) -> CollectiveError:
        """Return the exception that tells of it."""
        if self.is_disagreement:
            return UsageError(self.cause)
        if self.is_timeout:
            return CollectiveTimeoutError(self.cause)
        return PeerFailedError(self.rank, self.cause)


class Closable(Protocol):
    """Something that holds connections."""

    def close(self) -> None:
        """Drop the connections, so that peers blocked on them wake up."""
        ...


class FailureBoard:
    """One note in the store that the first rank to fail writes, and the connections to close then.

    A communicator and all that are split from it share one board.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self.rank = rank
        self.failure: Failure | None = None
        self._store = store
        self._is_cut_off = False
        self._open: weakref.WeakSet[Closable] = weakref.WeakSet()

    def watch(self, connections: Closable) -> None:
        """Close these too when the world fails."""
        self._open.add(connections)

    def check(self) -> None:
        """Raise if this rank knows of a failure."""
        if self.failure is not None:
            raise self.failure.error()

    def publish(self, failure: Failure) -> Failure:
        """Write the note unless there is one, close all connections, return what the note says."""
        if self.failure is None:
            self.failure = self._write(failure)
        for connections in all_of(self._open):
            connections.close()
        return self.failure

    def read(self, patience_s: float = 0.0) -> Failure | None:
        """Return what another rank has written, waiting a while for it, or None."""
        note = self._ask(functools.partial(self._await_note, patience_s), patience_s)
        return None if note is None else Failure(**json.loads(note))

    def explain(
        self,
        error: Exception,
        what: object,
        group_name: str,
        missing: Sequence[int],
        peer: int | None = None,
        progress: str = "",
    ) -> Exception:
        """Turn a transport's error into one that names ranks, and tell the world.

        Args:
            error: what the transport raised.
            what: the operation it was raised in.
            group_name: the group of the operation.
            missing: the ranks, counted in the world, that may not have come.
            peer: the rank at the other end of the connection, if known.
            progress: how far this rank has come, and what it knows of the missing ones.
        """
        is_timeout = isinstance(error, TimeoutError) or "imed out" in str(error)
        failure = self.failure or self.read(0.0 if is_timeout else _NOTE_S)
        reason = (str(error).splitlines() or [""])[0]
        if failure is None and is_timeout:
            cause = (
                f"rank {self.rank} gave up on {what} in {group_name!r}; missing: "
                f"{', '.join(f'rank {rank}' for rank in missing)}. They have not started it, or "
                "called something else: another operation, shape, dtype or order"
            )
            cause += f"; {progress}" if progress else ""
            failure = Failure(self.rank, cause, is_timeout=True)
        elif failure is None and peer is not None:
            failure = Failure(peer, f"the connection was lost during {what}: {reason}")
        elif failure is None:
            failure = Failure(self.rank, f"{what} in {group_name!r} failed: {reason}")
        told = self.publish(failure).error()
        told.add_note(f"rank {self.rank} was in {what} of {group_name!r}; {progress}".rstrip("; "))
        return told

    def _write(self, failure: Failure) -> Failure:
        note = json.dumps(attrs.asdict(failure))
        written = self._ask(lambda: self._store.compare_set(_KEY, "", note))
        return failure if written is None else Failure(**json.loads(written))

    def _await_note(self, patience_s: float) -> bytes | None:
        deadline = time.monotonic() + patience_s
        while not self._store.check([_KEY]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        return self._store.get(_KEY)

    def _ask(self, question: Callable[[], bytes | None], patience_s: float = 0.0) -> bytes | None:
        """Return the store's answer, None where it is gone together with its process, or hangs."""
        if self._is_cut_off:
            return None
        with contextlib.suppress(RuntimeError, ValueError):
            try:
                return within(patience_s + _STORE_S, question, f"rank {self.rank}, asking")
            except TimeoutError:
                self._is_cut_off = True
        return None
