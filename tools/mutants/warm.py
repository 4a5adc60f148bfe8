"""A process that has imported what is not ours, and runs each choice of tests in a fork of itself.

Importing torch takes longer than many a test. ``python -m tools.mutants.warm MODULE…`` reads a
request in JSON from each line of its input, and writes the answer as a line of its output: exit
code, seconds, seconds of processors, memory of the largest process. A fork leads a session of its
own, which is ended as a whole, whatever the tests started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest

HUNG = 124
GRACE_S = 10.0
_PAUSE_S = 0.02


def main(modules: Sequence[str]) -> None:
    """Import modules, then answer requests until there are no more."""
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(arguments: Sequence[str], deadline_s: float, log: str) -> dict[str, float]:
    """Run pytest in a fork; return how it ended and what it took."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(arguments, log)
    status: int | None = None
    try:
        status, used = _wait(child, began + deadline_s)
        if status is None:
            _signal(child, signal.SIGTERM)
            status, used = _wait(child, time.monotonic() + GRACE_S)
            code = HUNG
        else:
            code = os.waitstatus_to_exitcode(status)
    finally:
        _signal(child, signal.SIGKILL)
        if status is None:
            _, _, used = os.wait4(child, 0)
    return {
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "mebibytes": used.ru_maxrss // 1024,
    }


def _become(arguments: Sequence[str], log: str) -> NoReturn:
    """Be the tests: nothing of the parent but what it has imported."""
    code = 3
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect(os.devnull, os.O_RDONLY, 0)
        for number in (1, 2):
            _redirect(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, number)
        code = int(pytest.main(list(arguments)))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _redirect(path: str, flags: int, number: int) -> None:
    opened = os.open(path, flags, 0o600)
    os.dup2(opened, number)
    os.close(opened)


def _wait(child: int, until: float) -> tuple[int | None, Any]:
    while True:
        found, status, used = os.wait4(child, os.WNOHANG)
        if found:
            return status, used
        if time.monotonic() > until:
            return None, resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(_PAUSE_S)


def _signal(child: int, sign: signal.Signals) -> None:
    """Signal all that the child started; its number names the session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, sign)


if __name__ == "__main__":
    main(sys.argv[1:])
