"""Starts the processes of a benchmark, and times what they do."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from trainwright.collectives.testing import run_processes


def run_job(fn: Callable[..., Any], ranks: int, *args: Any, deadline_s: float) -> list[Any]:
    """Call ``fn(communicator, *args)`` in new processes of one thread each; return what they did.

    The processes talk over Gloo, and torch.distributed has its default group there. On Linux
    they end with this process, whatever ends it.

    Args:
        fn: a public function of a module.
        ranks: number of processes.
        *args: passed on by pickle, as are the results.
        deadline_s: for all of it.

    Raises:
        TimeoutError: the deadline passed.
        BaseException: what the first process to fail raised.
    """
    # The default action would leave the folder of the processes behind.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return run_processes(fn, ranks, *args, timeout_s=deadline_s)
    finally:
        signal.signal(signal.SIGTERM, before)


def time_steps(step: Callable[[], object], steps: int) -> float:
    """Return the seconds that a step takes on this rank; all ranks begin together.

    Args:
        step: makes one step; called once before too, since others have been here and the caches
            hold their data.
        steps: how many are timed.
    """
    step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
