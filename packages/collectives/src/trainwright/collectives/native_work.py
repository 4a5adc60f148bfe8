"""The Work of operations of a process group's own backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from trainwright.collectives.failures import FailureBoard
from trainwright.collectives.grad_mode import without_grad
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
        try:
            wait_for(self._works, timeout_s)
        except RuntimeError as error:
            raise self.explain(error) from error
        finish = self._finish
        self._works = []
        self._finish = None
        if finish is not None:
            with without_grad():
                finish()
        self._buffers = None

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the backend says so of every handle.

        Gloo's own messages and reduce-scatters do not say so before they were waited for.
        """
        return poll(lambda: all(work.is_completed() for work in self._works), within_s)

    def explain(self, error: RuntimeError) -> Exception:
        """Turn an error of the backend into one of this package."""
        return self._board.explain(error, self._what, self._name, self._ranks)


def wait_for(works: Sequence[dist.Work], timeout_s: float | None) -> None:
    """Wait as the backend does; each may take as long as given, or as the backend allows."""
    for work in works:
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
