"""Batches read ahead by threads, handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Runs readings on threads before they are asked for, never more than a number of them.

    What is read next is decided here, in order, when it is submitted; threads only carry it out.
    Their number and their pace change nothing of what comes out.

    Args:
        start: returns the next reading, a function that any thread may call; called in order, by
            the thread that asks for items.
        depth: readings that wait or are under way; 0 reads when asked, on the asking thread.
        workers: threads, at most ``depth`` of which have something to do.
    """

    def __init__(
        self, start: Callable[[], Callable[[], Item]], depth: int, workers: int = 1
    ) -> None:
        self._start = start
        self._depth = depth
        # Threads that wait for work end with the process, or when nobody holds the executor.
        self._threads = (
            ThreadPoolExecutor(min(workers, depth), thread_name_prefix="read-ahead")
            if depth
            else None
        )
        self._waiting: deque[Future[Item]] = deque()

    def next(self) -> Item:
        """Return the next item; an error of its reading is raised here, and again if asked again.

        Raises:
            Exception: whatever the reading raised.
        """
        if self._threads is None:
            return self._start()()
        while len(self._waiting) <= self._depth:
            self._waiting.append(self._threads.submit(self._start()))
        item = self._waiting[0].result()
        self._waiting.popleft()
        return item

    def drop(self) -> None:
        """Forget what was read ahead, and wait for what is being read."""
        for future in self._waiting:
            future.cancel()
        for future in self._waiting:
            if not future.cancelled():
                future.exception()
        self._waiting.clear()

    def close(self) -> None:
        """Forget what was read ahead and end the threads."""
        self.drop()
        if self._threads is not None:
            self._threads.shutdown()
