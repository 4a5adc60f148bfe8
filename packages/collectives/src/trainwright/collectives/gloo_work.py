"""The Work of an operation that consists of Gloo messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainwright.collectives.calls import Call
from trainwright.collectives.grad_mode import without_grad
from trainwright.collectives.scratch import Rows

if TYPE_CHECKING:
    from trainwright.collectives.gloo_backend import GlooBackend

# Peer, whether it is a receive, and Gloo's handle.
Ticket = tuple[int, bool, dist.Work]


class _Watch:
    """Somebody's waiting for a work: who has the claim waits for its messages, others for him."""

    # Locks, because an Event takes ten times as long to make.
    __slots__ = ("_is_over", "_open", "claim")

    def __init__(self) -> None:
        self.claim = threading.Lock()
        self._is_over = False
        self._open = threading.Lock()
        self._open.acquire()

    @property
    def is_held(self) -> bool:
        """Whether somebody waits for the messages."""
        return self.claim.locked() and not self._is_over

    def end(self) -> None:
        """Wake those who wait for the one with the claim."""
        self._is_over = True
        self._open.release()

    def wait(self, timeout_s: float | None) -> bool:
        """Return whether it ends within this time."""
        if not self._is_over and self._open.acquire(timeout=_lock_timeout(timeout_s)):
            self._open.release()
        return self._is_over


class GlooWork:
    """Messages under way, what to compute between and after them, and the buffers they use."""

    __slots__ = (
        "__weakref__",
        "_backend",
        "_buffers",
        "_error",
        "_finish",
        "_is_closed",
        "_is_done",
        "_is_given_up",
        "_is_sent",
        "_late",
        "_scratch",
        "_tickets",
        "_timeout_s",
        "_watch",
        "_what",
    )

    def __init__(self, backend: GlooBackend, what: object, timeout_s: float | None) -> None:
        self._backend = backend
        self._what = what
        self._timeout_s = timeout_s
        self._tickets: list[Ticket] = []
        self._late: list[Ticket] = []
        self._finish: Callable[[], None] | None = None
        self._scratch: Rows | None = None
        self._buffers: object = None
        self._is_sent: threading.Lock | None = None
        self._watch: _Watch | None = None
        self._error: Exception | None = None
        self._is_closed = False
        self._is_done = False
        self._is_given_up = False

    def start(
        self,
        tickets: list[Ticket],
        finish: Callable[[], None] | None,
        scratch: Rows | None,
        buffers: object,
    ) -> None:
        """Take over the messages and what belongs to them."""
        self._tickets = tickets
        self._finish = finish
        self._scratch = scratch
        self._buffers = buffers

    def start_late(self, late_receives: list[Ticket]) -> None:
        """Take over the receives of the second round; its sends come from the background."""
        self._late = late_receives
        self._is_sent = threading.Lock()
        self._is_sent.acquire()

    def send_late(self, send: Callable[[], list[Ticket]]) -> None:
        """Wait for the first round's receives, then start the second round's sends."""
        assert self._is_sent is not None
        try:
            receives = [ticket for ticket in self._tickets if ticket[1]]
            sends = [ticket for ticket in self._tickets if not ticket[1]]
            self._await(receives, None)
            self._tickets = sends
            # The only mode in which tensors made inside and outside of it may be written.
            with torch.inference_mode():
                self._late += send()
        except Exception as error:
            self._error = error
        self._is_sent.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all messages, then compute what is left."""
        if self._is_done:
            return
        self._backend.board.check()
        timeout_s = timeout_s or self._timeout_s
        watch = self._watch
        if watch is None:
            watch = self._watch = _Watch()
        if watch.claim.acquire(blocking=False):
            self._await_claimed(watch, timeout_s)
        elif not watch.wait(timeout_s):
            raise self._backend.explain(TimeoutError(), self._what, -1, self._senders)
        if self._error is not None:
            raise self._error
        if self._is_closed:
            self._backend.board.check()
        self._is_done = True
        if self._finish is not None:
            with without_grad():
                self._finish()
        if isinstance(self._what, Call):
            self._backend.log.finish(self._what)
        if self._scratch is not None:
            self._backend.scratch.give_back_rows(self._scratch)
        self._clear()

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether all messages have come; from the first call on a thread waits for them.

        Gloo only knows that a message has come once somebody has waited for it.
        """
        if self._is_done or self._is_closed:
            return True
        if self._watch is None:
            self._watch = _Watch()
            watcher = self._backend.watcher(self._senders)
            watcher.run(partial(self._keep_watch, self._watch))
        return self._watch.wait(within_s)

    @property
    def call(self) -> Call | None:
        """The collective, or None for messages of the caller."""
        return self._what if isinstance(self._what, Call) else None

    @property
    def is_under_way(self) -> bool:
        """Whether nobody has waited until it was over."""
        return not self._is_done and not self._is_closed

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits for its messages."""
        return self._watch is not None and self._watch.is_held

    def belongs_to(self, backend: GlooBackend) -> bool:
        """Whether it is one of this group."""
        return self._backend is backend

    def give_up(self) -> None:
        """Say nothing about messages that fail from now on: the process is about to end."""
        self._is_given_up = True

    def close(self) -> None:
        """Forget the messages; their connections can go."""
        self._is_closed = True
        self._clear()

    def __del__(self) -> None:
        # The messages are still under way and Gloo would cancel them together with this object.
        if not self._is_done and (self._tickets or self._late):
            self._backend.dropped.append(self)

    def _keep_watch(self, watch: _Watch) -> None:
        if watch.claim.acquire(blocking=False):
            self._await_claimed(watch, self._timeout_s)

    def _await_claimed(self, watch: _Watch, timeout_s: float | None) -> None:
        # Messages are waited for once, by whoever comes first: the watcher or `wait`.
        try:
            self._await_all(timeout_s)
        except Exception as error:
            # Frames would keep the messages, and they the connections.
            self._error = error.with_traceback(None)
        watch.end()

    def _await_all(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._is_sent is not None:
            self._await_background(timeout_s)
        self._await(self._tickets, deadline)
        self._await(self._late, deadline)

    @property
    def _senders(self) -> list[int]:
        return [peer for peer, is_receive, _ in self._tickets if is_receive]

    def _await(self, tickets: list[Ticket], deadline: float | None) -> None:
        work = None
        waited = 0
        try:
            for _, _, work in tickets:
                if deadline is None:
                    work.wait()
                else:
                    left_s = max(0.001, deadline - time.monotonic())
                    work.wait(timedelta(seconds=left_s))
                waited += 1
        except RuntimeError as error:
            if self._is_given_up:
                raise
            # Whoever keeps a ticket keeps the connection open.
            work = None
            peer = tickets[waited][0] if waited < len(tickets) else -1
            late = tickets[waited + 1 :]
            missing = [peer, *(other for other, _, handle in late if not _has_come(handle))]
            late.clear()
            raise self._backend.explain(error, self._what, peer, missing) from None

    def _await_background(self, timeout_s: float | None) -> None:
        assert self._is_sent is not None
        lock = self._is_sent
        if not lock.acquire(timeout=_lock_timeout(timeout_s)):
            raise self._backend.explain(TimeoutError(), self._what, -1, self._senders)
        lock.release()
        if self._error is not None:
            raise self._error

    def _clear(self) -> None:
        self._tickets.clear()
        self._late.clear()
        self._finish = None
        self._scratch = None
        self._buffers = None


def _lock_timeout(timeout_s: float | None) -> float:
    """Return what locks take: -1 for ever, and no more than they can."""
    return -1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)


def _has_come(work: dist.Work) -> bool:
    try:
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        return False
    return True
