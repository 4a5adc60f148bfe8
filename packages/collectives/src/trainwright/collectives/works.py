"""Kinds of `Work` that every communicator shares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Work


class DoneWork:
    """A Work with nothing left to wait for."""

    __slots__ = ()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""


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
