"""How the processes of a domain learn that one of them has failed, or has ended."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Sequence

from trainwright.collectives.failures import Failure
from trainwright.collectives.shm.meeting import Peer
from trainwright.collectives.shm.segment import Segment
from trainwright.collectives.shm.system import Fence

# Places of 64-bit numbers in a segment: when its owner told of a failure (0: never), which rank it
# was, whether a timeout, the length of the cause; the cause itself follows.
_WHEN = 32
_RANK = 33
_IS_TIMEOUT = 34
_LENGTH = 35
_TEXT_START = 512
_TEXT_STOP = 1 << 14


class News:
    """The failures that the processes have written into their segments; the oldest one counts."""

    def __init__(self, segments: Sequence[Segment], peers: Sequence[Peer], rank: int) -> None:
        self.failure: Failure | None = None
        self._segments = segments
        self._own = segments[rank]
        self._words = [segment.words for segment in segments]
        self._fence = Fence()
        self._mutex = threading.Lock()
        self._poll = select.poll()
        self._ranks = {peer.process: peer.rank for peer in peers}
        for process in self._ranks:
            self._poll.register(process, select.POLLIN)
        weakref.finalize(self, _close, tuple(self._ranks))

    def publish(self, failure: Failure) -> None:
        """Write it down for the others, unless this rank has told of one before."""
        own = self._own
        if own.words[_WHEN] or self.hear() is not None:
            return
        text = failure.cause.encode(errors="replace")[: _TEXT_STOP - _TEXT_START]
        own.map[_TEXT_START : _TEXT_START + len(text)] = text
        own.words[_LENGTH] = len(text)
        own.words[_RANK] = failure.rank
        own.words[_IS_TIMEOUT] = failure.is_timeout
        self._order()
        own.words[_WHEN] = time.monotonic_ns()
        self.hear()

    def hear(self) -> Failure | None:
        """Return the first failure that anybody has told of, or None."""
        if self.failure is None:
            for words in self._words:
                if words[_WHEN]:
                    break
            else:
                return None
            self._order()
            told = [segment for segment in self._segments if segment.words[_WHEN]]
            self.failure = _read(min(told, key=lambda segment: segment.words[_WHEN]))
        return self.failure

    def dead(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        # Threads of this rank wait for operations of their own, and poll refuses two at once.
        with self._mutex:
            ended = self._poll.poll(0)
        return {self._ranks[process] for process, _ in ended}

    def _order(self) -> None:
        with self._mutex:
            self._fence()


def _read(segment: Segment) -> Failure:
    words = segment.words
    text = segment.map[_TEXT_START : _TEXT_START + words[_LENGTH]]
    return Failure(words[_RANK], text.decode(errors="replace"), bool(words[_IS_TIMEOUT]))


def _close(processes: tuple[int, ...]) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.close(process)
