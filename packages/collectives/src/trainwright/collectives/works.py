"""Kinds of `Work` that every communicator shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Work

_POLL_S = 0.0002


class DoneWork:
    """A Work with nothing left to wait for."""

    __slots__ = ()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return True."""
        return True


DONE = DoneWork()


class JoinedWork:
    """Several works waited for in order."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for each of the works."""
        for work in self._works:
            work.wait(timeout_s)
        self._works = ()

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether each of the works is done."""
        deadline = time.monotonic() + within_s
        return all(work.is_done(max(0.0, deadline - time.monotonic())) for work in self._works)


class CopyBackWork:
    """A Work on contiguous stand-ins, copied to the caller's strided tensors once it is done."""

    __slots__ = ("_copies", "_work")

    def __init__(self, work: Work, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._copies = tuple(copies)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, then write the results in place."""
        self._work.wait(timeout_s)
        copies = self._copies
        self._copies = ()
        with torch.no_grad():
            for target, source in copies:
                target.copy_(source)

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the work is done, copied back or not."""
        return self._work.is_done(within_s)


class DeferredWork:
    """The Work of an operation inside a ``coalesce`` block, started when the block ends."""

    __slots__ = ("_work",)

    def __init__(self) -> None:
        self._work: Work | None = None

    def start(self, work: Work) -> None:
        """Say what has been started."""
        self._work = work

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the operation; inside the block this raises."""
        if self._work is None:
            raise UsageError(
                "operations of a coalesce() block start when the block ends, and this one has not "
                "been started: wait after the block"
            )
        self._work.wait(timeout_s)

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the operation is done; inside the block it is not."""
        return self._work is not None and self._work.is_done(within_s)


def poll(is_over: Callable[[], bool], within_s: float) -> bool:
    """Return whether something is over, looking again and again up to ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not is_over():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
