"""Runs in which something happens to a rank: how they are started, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.faulting_command import FAULT, FOLDER, Fault
from tests.running import MARK, Running, started, wait_until
from trainwright.checkpointing.state import StateStore

ROOT = Path(__file__).parents[1]
STEPS = 6
SMALL = ["--sequence-length", "16", "--global-batch", "8", "--evaluate-sequences", "4"]
SMALL += ["--sample-bytes", "0", "--dtype", "float64", "--steps", str(STEPS), "--save-every", "2"]
LAYOUTS = {
    "dp=2": ["--microbatches", "2", "--zero", "3"],
    "dp=2,tp=2": ["--microbatches", "2", "--zero", "1"],
    "dp=2,pp=2": ["--microbatches", "2", "--zero", "2", "--schedule", "1f1b"],
    "tp=2,pp=2": ["--microbatches", "4", "--schedule", "zb-h1", "--async-save"],
    "dp=2,tp=2,pp=2": ["--microbatches", "2", "--zero", "3", "--schedule", "1f1b"],
}
RANKS = {"dp=2": 2, "dp=2,tp=2,pp=2": 8}
"""How many ranks a layout has, where not four."""

TIMEOUT_S = 10.0
"""How long ranks of these runs wait for each other."""

NOTICE_S = 15.0
"""How long ranks may take, beside that, to learn of what has happened and to end.

A connection that closes is seen at once. Who waits for a rank that learnt of it and went is woken
by a look at the store, which begins after three seconds and is repeated every second; a process
looks for a second who failed, and gives its threads two to end. On two cores that four to eight
processes share that is doubled.
"""

DEADLINE_S = 150.0


@attrs.frozen
class Setting:
    """How a run is laid out and carried.

    Args:
        layout: one of `LAYOUTS`.
        comm: ``gloo`` or ``shm``.
    """

    layout: str
    comm: str

    @property
    def size(self) -> int:
        return RANKS.get(self.layout, 4)

    @property
    def arguments(self) -> list[str]:
        layout = ["--layout", self.layout, *LAYOUTS[self.layout], "--comm", self.comm]
        return [*SMALL, *layout, "--comm-timeout", str(TIMEOUT_S)]


@attrs.frozen
class Ended:
    """How the ranks of a run have ended.

    Args:
        codes: the exit code of each rank; None of one that was stopped, and killed in the end.
        errors: what each has said on standard error.
        seconds: from the moment of the fault to the end of the last rank.
        struck: whether the fault happened.
        counts: how often each rank came to each kind of moment, where it ended well.
    """

    codes: Mapping[int, int | None]
    errors: Mapping[int, str]
    seconds: float
    struck: bool
    counts: Mapping[int, dict[str, int]]

    @property
    def text(self) -> str:
        return "\n".join(f"--- rank {rank}: {text}" for rank, text in self.errors.items())


class Server:
    """Forks ranks from one process; leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self._running = contextlib.ExitStack()
        self._errors = (folder / "server").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faulting_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=environment_of_ranks() | {MARK: f"server {os.getpid()}"},
            start_new_session=True,
        )
        self._said = threading.Condition()
        self._statuses: dict[int, tuple[int, float]] = {}
        self._pids: list[int] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
        """Start a rank; returns its process."""
        assert self.process.stdin is not None
        order = {"arguments": list(arguments), "environment": dict(environment)}
        with self._said:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            number = len(self._pids) + 1
            assert self._said.wait_for(lambda: len(self._pids) >= number, 60), "it does not start"
            return self._pids[-1]

    def ends(self, pids: Sequence[int], seconds: float) -> dict[int, tuple[int, float]]:
        """Return exit codes and times of those that have ended within so many seconds."""
        with self._said:
            self._said.wait_for(lambda: all(pid in self._statuses for pid in pids), seconds)
            return {pid: self._statuses[pid] for pid in pids if pid in self._statuses}

    def close(self) -> None:
        for pid in self._pids:
            if pid not in self._statuses:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with self.process:
            self.process.kill()
        self._errors.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            with self._said:
                if "status" in told:
                    self._statuses[told["pid"]] = (told["status"], time.monotonic())
                else:
                    self._pids.append(told["pid"])
                self._said.notify_all()


def environment_of_ranks() -> dict[str, str]:
    """Return the environment in which ranks of these tests find this folder, and one host."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | single | {"PYTHONPATH": paths}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def described(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """Return the variables that let faults happen."""
    folder.mkdir(parents=True, exist_ok=True)
    return {FAULT: json.dumps([attrs.asdict(fault) for fault in faults]), FOLDER: str(folder)}


def run_apart(
    server: Server,
    setting: Setting,
    arguments: Sequence[str],
    folder: Path,
    faults: Sequence[Fault] = (),
    within_s: float = DEADLINE_S,
) -> Ended:
    """Run ranks that nobody watches: each has to see by itself that another has gone.

    Args:
        server: forks them.
        setting: of the run.
        arguments: of the tool, after those of the setting.
        folder: for what is told of the ranks.
        faults: what happens.
        within_s: what is left after so many seconds is killed.
    """
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    size = setting.size
    pids = []
    for rank in range(size):
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        variables = {name: str(value) for name, value in place.items()} | meeting
        variables |= described(faults, folder)
        pids.append(server.start(["train", *setting.arguments, *arguments], variables))
    stopped = {fault.rank for fault in faults if fault.kind == "stop"}
    others = [pid for rank, pid in enumerate(pids) if rank not in stopped]
    server.ends(others, within_s)
    left = [pid for pid in pids if pid not in server.ends(pids, 0.0 if stopped else 0.1)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    ends = server.ends(pids, 30)
    codes = {r: None if pid in left else ends[pid][0] for r, pid in enumerate(pids)}
    last = max((ends[pid][1] for pid in pids if pid not in left), default=time.monotonic())
    return ended_of(folder, codes, last)


def ended_of(folder: Path, codes: Mapping[int, int | None], last: float) -> Ended:
    """Return how ranks have ended, of which the last did so at a given time."""
    strikes = [float(path.read_text()) for path in folder.glob("struck-*")]
    counts = {rank: _read(folder / f"counts-{rank}") for rank in codes}
    return Ended(
        codes=codes,
        errors={rank: _read(folder / f"errors-{rank}") for rank in codes},
        seconds=last - max(strikes) if strikes else 0.0,
        struck=bool(strikes),
        counts={rank: json.loads(text) for rank, text in counts.items() if text},
    )


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def launched(
    setting: Setting, arguments: Sequence[str], folder: Path, faults: Sequence[Fault] = ()
) -> Iterator[Running]:
    """Start the tool with its own launcher; whatever is left of it in the end is killed."""
    command = [sys.executable, "-m", "tests.faulting_command", "train"]
    variables = environment_of_ranks() | described(faults, folder)
    with started([*setting.arguments, *arguments], command, variables) as running:
        yield running


def run_launched(
    setting: Setting, arguments: Sequence[str], folder: Path, faults: Sequence[Fault] = ()
) -> tuple[Ended, int, str]:
    """Run the tool with its own launcher; returns its exit code and what it said besides."""
    with launched(setting, arguments, folder, faults) as running:
        _, errors = running.process.communicate(timeout=DEADLINE_S)
        last = time.monotonic()
        wait_until(lambda: running.members() == {}, 10)
        code = int(running.process.returncode)
    return ended_of(folder, dict.fromkeys(range(setting.size)), last), code, errors


@attrs.frozen
class Left:
    """What a run has left: what it would go on from, bit for bit, and what it has told."""

    tensors: Mapping[str, bytes]
    plain: Mapping[str, Any]
    told: Sequence[Sequence[float]]


def left_by(folder: Path) -> Left:
    """Return the newest checkpoint's tensors and values, and the steps that were told."""
    store = StateStore(folder / "checkpoints")
    store.verify(STEPS)
    (newest,) = (folder / "checkpoints").glob(f"step-{STEPS:08d}-*")
    tensors = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    plain = json.loads((newest / "manifest.json").read_text())["body"]["plain"]
    plain["guards/state"] = json.loads(plain["guards/state"])
    # Snapshots are in memory: a run that was killed has others than one that was not.
    del plain["guards/state"]["marks"]
    names = ("step", "loss", "grad_norm", "lr", "tokens")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "loss" in (row := json.loads(line))]
    return Left(tensors, plain, [[row[name] for name in names] for row in rows])


def check_checkpoints(folder: Path) -> int | None:
    """Check that whatever is called a checkpoint is a whole one; returns the newest."""
    store = StateStore(folder / "checkpoints")
    for step in store.steps():
        store.verify(step)
    return store.latest()


def back_to(folder: Path, step: int) -> None:
    """Make of a run what it would be had it ended right after a step that it has saved."""
    for path in (folder / "checkpoints").glob("step-*"):
        if int(path.name.split("-")[1]) > step:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def begin_or_resume(run: Path, book: Path) -> list[str]:
    """Return how a run is begun, or goes on if it has begun."""
    if (run / "config.json").exists():
        return ["--resume", str(run)]
    return ["--data", str(book), "--out", str(run)]


def drawn(draw: random.Random, kind: str, moment: str, counts: Mapping[int, Any]) -> Fault:
    """Draw a rank, and the moment among those that it comes to in a run that nothing disturbs."""
    rank = draw.choice([rank for rank in sorted(counts) if counts[rank][moment]])
    # After its part of the last barrier nobody needs it any more.
    last = counts[rank][moment] - (moment == "collective")
    return Fault(kind, moment, rank, draw.randint(1, last))
