"""A process that has imported everything and forks a run for each line it is given.

It reads one JSON object a line: ``arguments`` of the tool, and ``die_at``, None or the number of
the file operation of the run's store at which the run kills itself with SIGKILL. Of each run it
writes the process id, and when that has ended its exit status: negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

# Imported by a run where it first needs them; here they are shared by all.
import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # noqa: F401

from trainwright.checkpointing.state import LocalFiles
from trainwright.integration import worker
from trainwright.integration.cli import main


class DeadlyFiles:
    """The files of this machine; the process dies when it asks for a certain one of them."""

    def __init__(self, die_at: int) -> None:
        self._inner = LocalFiles()
        self._left = die_at
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._inner, name)

        def counted(*arguments: Any) -> Any:
            self.count()
            result = act(*arguments)
            return DeadlyFile(self, result) if name in ("create", "open") else result

        return counted

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


class DeadlyFile:
    def __init__(self, files: DeadlyFiles, inner: Any) -> None:
        self._files = files
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("write", "sync", "read_into"):
            self._files.count()
        return getattr(self._inner, name)


def run(arguments: list[str], die_at: int | None) -> int:
    store = worker.StateStore
    files = DeadlyFiles(10**9 if die_at is None else die_at)
    worker.StateStore = lambda *given, **named: store(*given, files=files, **named)
    return main(arguments)


def serve() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            os._exit(run(wanted["arguments"], wanted["die_at"]))
        say(pid)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
