"""Commands as real processes: all of a run's are found by a mark, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

DEADLINE_S = 240.0
MARK = "TRAINWRIGHT_TEST_RUN"
TRAIN = (sys.executable, "-m", "trainwright.integration", "train")


@attrs.frozen(eq=False)
class Running:
    """A started command and the mark that all its processes carry in their environment.

    Workers are forked one after the other from one process, which the tool starts.
    """

    process: subprocess.Popen[str]
    mark: str

    def members(self) -> dict[int, int]:
        """Return the living processes of the run, the oldest first, and the parent of each."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() in variables and fields[0] != "Z":
                found.append((int(fields[19]), int(folder.name), int(fields[1])))
        return {pid: parent for _, pid, parent in sorted(found)}

    def workers(self) -> list[int]:
        """Return the processes of the ranks."""
        members = self.members()
        return [pid for pid, parent in members.items() if members.get(parent) == self.process.pid]


@contextmanager
def started(
    arguments: Sequence[str],
    command: Sequence[str] = TRAIN,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Running]:
    """Start the command; whatever is left of it in the end is killed."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", MARK: mark} | dict(environment or {}),
        start_new_session=True,
    )
    running = Running(process, mark)
    try:
        yield running
    finally:
        for pid in running.members():
            os.kill(pid, signal.SIGKILL)
        with process:
            process.wait(timeout=30)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def finish(arguments: Sequence[str]) -> tuple[str, str]:
    """Run the tool to its end; return what it printed. It must leave no process behind."""
    with started(arguments) as running:
        output, errors = running.process.communicate(timeout=DEADLINE_S)
        assert running.process.returncode == 0, errors
        wait_until(lambda: running.members() == {}, 10)
    return output, errors


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that a run has recorded so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for line in lines if "loss" in (row := json.loads(line))]
