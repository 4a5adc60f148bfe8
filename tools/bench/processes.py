"""Starts the processes of a benchmark, and sees to it that none outlives it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from trainwright.collectives import Communicator
from trainwright.collectives.testing import run_processes


def run_job(fn: Callable[..., Any], ranks: int, *args: Any, deadline_s: float) -> list[Any]:
    """Call ``fn(communicator, *args)`` in new processes of one thread each; return what they did.

    The processes talk over Gloo, and torch.distributed has its default group there. They end with
    this process, whatever ends it.

    Args:
        fn: a public function of a module.
        ranks: number of processes.
        *args: passed on by pickle, as are the results.
        deadline_s: for all of it.

    Raises:
        TimeoutError: the deadline passed.
        BaseException: what the first process to fail raised.
    """
    # The default action would end this process without a word to its children.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        task = (fn.__module__, fn.__qualname__)
        return run_processes(_run, ranks, task, os.getpid(), args, timeout_s=deadline_s)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(
    communicator: Communicator, task: tuple[str, str], parent: int, args: tuple[Any, ...]
) -> Any:
    if sys.platform == "linux":
        _end_with(parent)
    module, name = task
    __import__(module)
    return getattr(sys.modules[module], name)(communicator, *args)


def _end_with(parent: int) -> None:
    """End this process with the benchmark, which may be gone while its child goes on."""
    try:
        process = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit("the benchmark that started this process is gone")

    def wait() -> None:
        select.select([process], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end with the benchmark", daemon=True).start()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
