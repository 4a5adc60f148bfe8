"""The Work of operations of a process group's own backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from trainwright.collectives.failures import FailureBoard
from trainwright.collectives.works import poll

Finish = Callable[[], object] | None


class NativeWork:
    """Handles of the backend, what to compute after them, and the buffers they use."""

    __slots__ = (
        "_board",
        "_buffers",
        "_finish",
        "_name",
        "_ranks",
        "_timeout_s",
        "_what",
        "_works",
    )

    def __init__(
        self,
        board: FailureBoard,
        name: str,
        ranks: Sequence[int],
        what: object,
        timeout_s: float | None,
    ) -> None:
        self._board = board
        self._name = name
        self._ranks = ranks
        self._what = what
        self._timeout_s = timeout_s
        self._works: list[dist.Work] = []
        self._finish: Finish = None
        self._buffers: object = None

    def start(self, works: list[dist.Work], finish: Finish, buffers: object) -> None:
        """Take over the handles and what belongs to them."""
        self._works = works
        self._finish = finish
        self._buffers = buffers

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait as the backend does, on CUDA by ordering the stream, then compute what is left."""
        timeout_s = timeout_s or self._timeout_s
        with self.explained():
            for work in self._works:
                if timeout_s is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout_s))
        finish = self._finish
        self._works = []
        self._finish = None
        if finish is not None:
            with torch.no_grad():
                finish()
        self._buffers = None

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the backend says so of every handle.

        Gloo's own messages and reduce-scatters do not say so before they were waited for.
        """
        return poll(lambda: all(work.is_completed() for work in self._works), within_s)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of the backend into those of this package."""
        try:
            yield
        except RuntimeError as error:
            raise self._board.explain(error, self._what, self._name, self._ranks) from error
