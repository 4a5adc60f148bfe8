"""A process that has imported everything and forks ranks, each in an environment of its own.

It reads one JSON object a line, with the ``arguments`` of the tool and the ``environment`` to add,
and writes one a line: the ``pid`` of each process, and its ``status`` when it has ended, negative
for a signal.
"""

from __future__ import annotations

import json
import os
import select
import sys

# Imported by a run where it first needs them; here they are shared by all.
import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # noqa: F401

from tests import faulting_command

LOOK_S = 0.02


def start(arguments: list[str], environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ.update(environment)
        os.dup2(2, 1)
        code = faulting_command.main(arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    # As processes end that multiprocessing has forked; to take down what all share takes seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say(**words: int) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def serve() -> None:
    living: set[int] = set()
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            wanted = json.loads(line)
            pid = start(wanted["arguments"], wanted["environment"])
            living.add(pid)
            say(pid=pid)
        while living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            living.discard(pid)
            say(pid=pid, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    serve()
