"""The tool, with a fault that happens to one of its ranks at a moment that was drawn before.

``python -m tests.faulting_command train …`` is ``python -m trainwright.integration train …`` with
hooks that count what each rank does: operations with its peers, instructions of the pipeline, what
is asked of the disk. They are put in from outside, as variables of the environment say; the tool
itself knows nothing of them.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from trainwright.checkpointing.state import LocalFiles
from trainwright.collectives.gloo_backend import GlooBackend
from trainwright.collectives.shm.group import ShmBackend
from trainwright.integration import cli, worker
from trainwright.pipeline_schedules.execute.run import Run

FAULT = "TRAINWRIGHT_TEST_FAULT"
FOLDER = "TRAINWRIGHT_TEST_FAULT_FOLDER"
LINK = "TRAINWRIGHT_TEST_LINK"
"""The network interface that a fault takes down."""

MOMENTS = ("start", "collective", "microbatch", "save", "load")
WRITING = ("make_folder", "create", "rename", "sync_folder", "remove_folder", "write", "sync")
READING = ("open", "read_into", "view")
LATE_S = 20.0
"""How long a disk that has become slow takes for one thing, where nothing else is said."""

tool = cli.main


class PlantedError(RuntimeError):
    """What goes wrong in a test."""


@attrs.frozen
class Fault:
    """What happens where and when.

    Args:
        kind: ``kill``, ``stop``, ``raise``, ``exit``, ``full`` (of the disk), ``slow`` (once),
            ``clock`` (which jumps by ``seconds``) or ``cut`` (of the link, for ``seconds``; for
            good if these are 0).
        moment: what is counted.
        rank: to whom it happens; it happens once, whatever starts again.
        count: at the so manieth of these moments.
        seconds: how slow, or how far.
    """

    kind: str
    moment: str
    rank: int
    count: int
    seconds: float = LATE_S

    def strike(self) -> None:
        """Let it happen."""
        if self.kind in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        elif self.kind == "raise":
            raise PlantedError(f"planted in {self.moment} {self.count}")
        elif self.kind == "exit":
            os._exit(3)
        elif self.kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif self.kind == "clock":
            now = time.time
            time.time = lambda: now() + self.seconds
        elif self.kind == "cut":
            self._cut(os.environ[LINK])
        else:
            time.sleep(self.seconds)

    def _cut(self, link: str) -> None:
        words = f"ip link set {link} down"
        if self.seconds:
            words += f"; sleep {self.seconds}; ip link set {link} up"
        # What is to come later must not wait for this rank, nor end with it.
        subprocess.Popen(["sh", "-c", words], start_new_session=True)


@attrs.define(eq=False)
class Moments:
    """Counts the moments of this process, and lets the fault happen at its own.

    Args:
        folder: where it is noted that it happened, and what each rank did in all.
        rank: this one; -1 for what starts the ranks.
        faults: that may happen.
    """

    folder: Path
    rank: int
    faults: tuple[Fault, ...]
    counts: dict[str, int] = attrs.Factory(lambda: dict.fromkeys(MOMENTS, 0))
    _lock: threading.Lock = attrs.Factory(threading.Lock)

    def come(self, moment: str) -> None:
        """Count a moment."""
        with self._lock:
            self.counts[moment] += 1
            count = self.counts[moment]
        for number, fault in enumerate(self.faults):
            is_here = (fault.moment, fault.rank, fault.count) == (moment, self.rank, count)
            if is_here and self._is_first(number):
                fault.strike()

    def _is_first(self, number: int) -> bool:
        try:
            with (self.folder / f"struck-{number}").open("x") as file:
                file.write(repr(time.monotonic()))
        except FileExistsError:
            return False
        return True

    def say(self, name: str, text: str) -> None:
        """Leave a word of this rank in the folder."""
        (self.folder / f"{name}-{self.rank}").write_text(text)


class CountedFiles:
    """The files of this machine, what is asked of them being counted."""

    def __init__(self, moments: Moments) -> None:
        self._inner = LocalFiles()
        self._moments = moments

    def __getattr__(self, name: str) -> Callable[..., Any]:
        act = getattr(self._inner, name)

        def counted(*given: Any) -> Any:
            _count_file(self._moments, name)
            result = act(*given)
            return CountedFile(self._moments, result) if name in ("create", "open") else result

        return counted


class CountedFile:
    def __init__(self, moments: Moments, inner: Any) -> None:
        self._moments = moments
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        _count_file(self._moments, name)
        return getattr(self._inner, name)


def _count_file(moments: Moments, name: str) -> None:
    if name in WRITING:
        moments.come("save")
    elif name in READING:
        moments.come("load")


def _before_and_after(
    kind: type, name: str, moments: Moments, moment: str, *, is_twice: bool
) -> None:
    act = getattr(kind, name)

    def counted(*given: Any, **named: Any) -> Any:
        moments.come(moment)
        result = act(*given, **named)
        if is_twice:  # begun, and the peers perhaps in the midst of it
            moments.come(moment)
        return result

    setattr(kind, name, counted)


def _install(moments: Moments) -> None:
    for backend in (GlooBackend, ShmBackend):
        for name in ("start", "exchange"):
            _before_and_after(backend, name, moments, "collective", is_twice=True)
    _before_and_after(Run, "perform", moments, "microbatch", is_twice=False)
    for name in ("open_data", "assemble", "_train"):
        _before_and_after(worker, name, moments, "start", is_twice=False)
    store = worker.StateStore
    files = CountedFiles(moments)
    worker.StateStore = lambda *given, **named: store(*given, files=files, **named)


def faults_of(environment: Mapping[str, str]) -> tuple[Fault, ...]:
    """Return what is to happen."""
    return tuple(Fault(**values) for values in json.loads(environment.get(FAULT, "[]")))


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; a rank leaves a word on how it has ended."""
    if "RANK" not in os.environ:
        cli.main = main  # what the ranks are started with
        return tool(arguments)
    moments = Moments(Path(os.environ[FOLDER]), int(os.environ["RANK"]), faults_of(os.environ))
    errors = os.open(
        moments.folder / f"errors-{moments.rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND
    )
    os.dup2(errors, 2)  # each rank's words apart
    os.close(errors)
    _install(moments)
    moments.come("start")
    code = tool(arguments)
    moments.say("counts", json.dumps(moments.counts))
    return code


if __name__ == "__main__":
    # By its name, so that ranks in other processes find it.
    from tests import faulting_command

    sys.exit(faulting_command.main())
