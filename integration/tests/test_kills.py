"""Runs that are killed without a warning, and are what they would have been when resumed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from trainwright.checkpointing import StateStore

pytestmark = pytest.mark.processes

STEPS = 4
DEADLINE_S = 120.0
SMALL = ["--sequence-length", "16", "--global-batch", "4", "--evaluate-sequences", "4"]
SMALL += ["--sample-bytes", "0", "--steps", str(STEPS), "--save-every", "1", "--keep", "2"]
THREADS = ["--comm", "threads"]
LAYOUTS = {
    "dp=2": ["--layout", "dp=2", "--zero", "1", "--dtype", "bfloat16"],
    "tp=2,pp=2": ["--layout", "tp=2,pp=2", "--model", "tiny-tied"],
    "dp=2,tp=2": ["--layout", "dp=2,tp=2", "--zero", "3", "--schedule", "1f1b"],
}

Outcome = tuple[dict[str, bytes], dict[str, Any], list[Any]]


@attrs.frozen(eq=False)
class Run:
    """One run of the tool: its process, by a handle that never means another one."""

    zygote: Zygote
    pid: int
    handle: int

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def end(self) -> int:
        """Return the exit status; a run that does not end in time is killed."""
        watch = threading.Timer(DEADLINE_S, self.kill)
        watch.start()
        try:
            return self.zygote.end()
        finally:
            watch.cancel()
            os.close(self.handle)

    def workers(self) -> list[int]:
        """Return handles of the processes that this one has started, the innermost only."""
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        inside = {self.pid}
        while more := {pid for pid, parent in parents.items() if parent in inside} - inside:
            inside |= more
        leaves = inside - {parents.get(pid) for pid in inside} - {self.pid}
        return [os.pidfd_open(pid) for pid in sorted(leaves)]


class Zygote:
    """Starts runs within milliseconds, and kills none but these."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        script = Path(__file__).with_name("zygote.py")
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def start(self, arguments: list[str], die_at: int | None = None) -> Run:
        """Start the tool with these arguments; with ``die_at`` it kills itself."""
        assert self.process.stdin is not None
        wanted = {"arguments": ["train", *arguments], "die_at": die_at}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        pid = int(self._line())
        return Run(self, pid, os.pidfd_open(pid))

    def end(self) -> int:
        return int(self._line())

    def said(self) -> str:
        return self._errors.read_text()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(tmp_path_factory.mktemp("zygote") / "errors")
    try:
        yield zygote
    finally:
        with zygote.process:
            zygote.process.kill()


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text("of every run that was killed nothing but its time is lost. " * 20)
    return path


@pytest.fixture(scope="module")
def never_stopped(
    zygote: Zygote, book: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The runs that the killed ones have to equal, by layout; each is made when first wanted."""

    class Known(dict[str, Any]):
        def __missing__(self, layout: str) -> Any:
            folder = tmp_path_factory.mktemp("never stopped") / "run"
            arguments = [*SMALL, *LAYOUTS[layout], "--data", str(book), "--out", str(folder)]
            assert zygote.start([*arguments, *THREADS]).end() == 0, zygote.said()
            self[layout] = outcome(folder)
            return self[layout]

    return Known()


def outcome(folder: Path) -> Outcome:
    """Return the bytes of the last checkpoint's tensors, its plain values and the metrics."""
    (newest,) = (folder / "checkpoints").glob(f"step-{STEPS:08d}-*")
    tensors = {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
    plain = json.loads((newest / "manifest.json").read_text())["body"]["plain"]
    plain["guards/state"] = json.loads(plain["guards/state"])
    # Snapshots are in memory: a run that was killed has others than one that was not.
    del plain["guards/state"]["marks"]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for line in lines if "loss" in (row := json.loads(line))]
    return tensors, plain, [[row[k] for k in ("step", "loss", "grad_norm", "lr")] for row in rows]


def wait_for(folder: Path, sign: str, run: Run) -> None:
    """Wait until something of that name lies among the checkpoints, or the run has ended."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and not select.select([run.handle], [], [], 0)[0]:
        try:
            if any(name.startswith(sign) for name in os.listdir(folder / "checkpoints")):
                return
        except FileNotFoundError:
            pass
        time.sleep(0.0005)


def kill_and_resume(
    zygote: Zygote, arguments: list[str], folder: Path, draw: random.Random, times: int
) -> int:
    """Kill a run and its resumptions at drawn moments, then let it end; returns the kills."""
    kills = 0
    for number in range(times):
        kind = draw.choice(["operation", "saving", "removing", "delay"])
        die_at = draw.randrange(150) if kind == "operation" else None
        run = zygote.start([*arguments, *begin_or_resume(folder)], die_at)
        if kind in ("saving", "removing"):
            wait_for(folder, f".{kind}", run)
        if kind != "operation":
            time.sleep(draw.random() * (0.02 if kind != "delay" else 1.0))
            run.kill()
        status = run.end()
        assert status in (0, -signal.SIGKILL), f"kill {number} ({kind}): {zygote.said()}"
        kills += status == -signal.SIGKILL
        check_what_is_left(folder)
    assert zygote.start([*arguments, *begin_or_resume(folder)]).end() == 0, zygote.said()
    return kills


def begin_or_resume(folder: Path) -> list[str]:
    return ["--resume" if (folder / "config.json").exists() else "--out", str(folder)]


def check_what_is_left(folder: Path) -> None:
    """Whatever is called a checkpoint is a whole one."""
    store = StateStore(folder / "checkpoints")
    for step in store.steps():
        store.verify(step)
    for left in store.leftovers():
        assert left.endswith("interrupted, or under way"), left


def killed_equals_never_stopped(
    zygote: Zygote, never_stopped: dict[str, Any], book: Path, folder: Path, case: str, times: int
) -> None:
    layout, saving, seed = case.split()
    arguments = [*SMALL, *LAYOUTS[layout], *THREADS, "--data", str(book)]
    arguments += ["--async-save"] if saving == "async" else []
    right = never_stopped[layout]

    kills = kill_and_resume(zygote, arguments, folder, random.Random(seed), times)

    assert kills > 0
    assert_same_outcome(folder, right)


def assert_same_outcome(folder: Path, right: Outcome) -> None:
    """Everything is equal bit for bit, and what the limit allows is all that is left.

    What the last save was killed in removing waits for the next save.
    """
    tensors, plain, measured = outcome(folder)
    assert measured == right[2]
    assert plain == right[1]
    assert tensors == right[0]
    left = os.listdir(folder / "checkpoints")
    whole = sorted(name[:14] for name in left if name.startswith("step-"))
    assert whole[-2:] == [f"step-{n:08d}-" for n in (STEPS - 1, STEPS)]
    # One more stays for the snapshot that a resumed run begins with.
    assert len(left) <= 4


@pytest.mark.parametrize("case", ["dp=2 async 1", "dp=2 sync 2"])
def test_a_run_killed_at_any_moment_ends_as_one_that_was_never_stopped(
    zygote: Zygote, never_stopped: dict[str, Any], book: Path, tmp_path: Path, case: str
) -> None:
    killed_equals_never_stopped(zygote, never_stopped, book, tmp_path / "run", case, 3)


def test_ranks_of_which_one_is_killed_while_saving_end_as_if_it_had_not_been(
    zygote: Zygote, never_stopped: dict[str, Any], book: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = [*SMALL, *LAYOUTS["dp=2"], "--comm", "gloo", "--data", str(book)]
    run = zygote.start([*arguments, "--out", str(folder)])
    wait_for(folder, ".saving", run)

    first, *_, last = run.workers()
    signal.pidfd_send_signal(last, signal.SIGKILL)
    status = run.end()
    check_what_is_left(folder)
    finished = zygote.start([*arguments, "--resume", str(folder)]).end()

    assert first != last
    assert status == 1
    assert "failed: Signal 9 (SIGKILL)" in zygote.said()
    assert finished == 0
    assert_same_outcome(folder, never_stopped["dp=2"])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("saving", ["sync", "async"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_killed_at_many_moments_end_as_those_that_were_never_stopped(
    zygote: Zygote,
    never_stopped: dict[str, Any],
    book: Path,
    tmp_path: Path,
    layout: str,
    saving: str,
    seed: int,
) -> None:
    case = f"{layout} {saving} {seed}"
    killed_equals_never_stopped(zygote, never_stopped, book, tmp_path / "run", case, 6)
