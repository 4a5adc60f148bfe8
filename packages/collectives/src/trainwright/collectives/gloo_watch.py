"""A thread that tells ranks that wait for each other in different collectives so."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from trainwright.collectives.background import Bystander, all_of
from trainwright.collectives.calls import Call
from trainwright.collectives.failures import Failure, FailureBoard
from trainwright.collectives.gloo_questions import Note

if TYPE_CHECKING:
    from trainwright.collectives.gloo_backend import GlooBackend
    from trainwright.collectives.gloo_work import GlooWork

# How long an operation is under way before this rank asks, and how often it looks.
_PATIENCE_S = 3.0
_PERIOD_S = 1.0
_GRACE_S = 2.0

_RULE = (
    "All ranks must call the same operations in the same order with the same shapes, dtypes and "
    "arguments; Recorded(comm, verify=True) tells where in the code they were called"
)


class CallWatch:
    """Compares the calls of ranks that have been at a standstill for a while.

    A collective that somebody waits for too long is asked about: `Questions` says how. Ranks that
    are stuck in anything answer for all that they have started, and for the last that they have
    finished. Where two calls of one number differ, the world fails with a text that names both.
    Calls that are alike are never touched, however late a peer is or a work is waited for. A rank
    that has failed meanwhile is found first.

    Args:
        board: where the difference is told.
        patience_s: how long an operation is under way before anything is done.
        period_s: how often the thread looks. It starts with the first group and ends with the
            last, or when the world fails or its store is gone.
    """

    def __init__(
        self,
        board: FailureBoard,
        patience_s: float = _PATIENCE_S,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._board = board
        self._patience_s = patience_s
        self._period_s = period_s
        self._backends: weakref.WeakSet[GlooBackend] = weakref.WeakSet()
        self._since: weakref.WeakKeyDictionary[GlooWork, float] = weakref.WeakKeyDictionary()
        self._is_over = threading.Event()
        self._thread: Bystander | None = None

    def add(self, backend: GlooBackend) -> None:
        """Look at the operations of this group too."""
        self._backends.add(backend)
        if self._thread is None:
            self._thread = Bystander(
                target=_keep_looking,
                args=(weakref.ref(self), self._is_over, self._period_s),
                name=f"{backend.name}, rank {backend.rank}, comparing calls",
            )
            weakref.finalize(self, _end, self._is_over, self._thread)
            self._thread.start()

    def look(self) -> None:
        """Compare calls if an operation of this rank has been under way for long."""
        if self._board.failure is not None:
            self._is_over.set()
            return
        now = time.monotonic()
        backends = all_of(self._backends)
        late = [
            work
            for backend in backends
            for work in all_of(backend.works)
            if work.is_under_way and now - self._since.setdefault(work, now) >= self._patience_s
        ]
        failure = self._board.read() if late else None
        if failure is not None:
            # Who failed has closed its connections, but those who wait for ranks that learnt of it
            # and went on were woken by nobody.
            self._board.publish(failure)
            return
        try:
            for backend in backends if late else ():
                self._compare(backend, [work for work in late if work.belongs_to(backend)])
        except (RuntimeError, ValueError):
            # The store has gone together with the process that served it.
            self._is_over.set()

    def _compare(self, backend: GlooBackend, late: list[GlooWork]) -> None:
        under_way = [*all_of(backend.works), *backend.dropped]
        calls = {work.call.number: work.call for work in under_way if work.call is not None}
        awaited = [work.call for work in late if work.call is not None and work.is_awaited]

        def recall(number: int) -> str | None:
            call = calls.get(number)
            return backend.log.recall(number) if call is None else call.describe()

        found = None
        if awaited:
            oldest = min(awaited, key=_number_of)
            found = backend.questions.ask(_number_of(oldest), oldest.describe())
        found = found or backend.questions.answer(recall, backend.log.num_started)
        if found is not None:
            self._refuse(backend, *found)

    def _refuse(self, backend: GlooBackend, asked: Note, mine: Note) -> None:
        said = "; ".join(
            f"rank {backend.ranks[note.rank]} called {note.called}" for note in (asked, mine)
        )
        where = f"collective {mine.number} of {backend.name!r}"
        cause = f"{where} differs between ranks: {said}. {_RULE}"
        self._board.publish(Failure(self._board.rank, cause, is_disagreement=True))


def _number_of(call: Call) -> int:
    assert call.number is not None
    return call.number


def _keep_looking(
    reference: weakref.ref[CallWatch], is_over: threading.Event, period_s: float
) -> None:
    while not is_over.wait(period_s):
        watch = reference()
        if watch is None:
            return
        watch.look()
        del watch


def _end(is_over: threading.Event, thread: threading.Thread) -> None:
    """End the thread before the interpreter, which it would take down from inside the store."""
    is_over.set()
    if thread is not threading.current_thread():
        thread.join(_GRACE_S)
