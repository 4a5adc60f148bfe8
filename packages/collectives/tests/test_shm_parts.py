"""Parts of the communicator over shared memory, without peers."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainwright.collectives.shm.meeting import Peer
from trainwright.collectives.shm.news import News


class Memory:
    """What of a segment is read."""

    words = memoryview(bytearray(1024)).cast("q")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_threads_that_wait_for_different_operations_look_for_the_dead_at_the_same_time() -> None:
    news = News([Memory()], [Peer(7, os.pidfd_open(os.getpid()))], 0)  # type: ignore[list-item]

    def look(_: int) -> bool:
        return any(news.dead() for _ in range(2000))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(look, range(4)))
    finally:
        sys.setswitchinterval(before)

    assert not any(found)
