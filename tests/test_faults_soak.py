"""A run that is killed again and again for half an hour, and loses nothing but time."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.faulting import environment_of_ranks
from tests.faulting_session import FIGURES
from tests.running import Running, metrics, started, wait_until
from trainwright.checkpointing.state import StateStore
from trainwright.integration.run_folder import SUPERSEDED

pytestmark = [pytest.mark.processes, pytest.mark.fault]

SAVE_EVERY = 20
COMMON = ["--layout", "dp=2", "--zero", "1", "--microbatches", "2", "--sequence-length", "32"]
COMMON += ["--global-batch", "8", "--sample-bytes", "0", "--keep", "3", "--async-save"]
COMMON += ["--save-every", str(SAVE_EVERY)]
# More than half an hour is enough for: what decides the learning rates.
COMMON += ["--steps", "1000000", "--warmup", "20"]
START_S = 150.0
END_S = 100.0

KILLS = ("a worker is killed", "a worker is stopped", "the launcher is killed", "it is told to end")
TAIL_BYTES = 4096
STEP = re.compile(rb'{"step": ?(\d+), ?"loss".*}$')
TOLD = ("step", "loss", "grad_norm", "lr", "tokens")


@attrs.define
class Soak:
    """A run, what has happened to it, and what that has cost.

    Args:
        folder: of the run.
        arguments: of the tool, for the first start.
        draw: decides what happens and when.
    """

    folder: Path
    arguments: list[str]
    draw: random.Random
    happened: dict[str, int] = attrs.Factory(lambda: dict.fromkeys(KILLS, 0))
    lost_s: list[float] = attrs.Factory(list)
    lost_steps: list[int] = attrs.Factory(list)
    _fell: float = 0.0

    @property
    def step(self) -> int:
        """The last step that is recorded."""
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
        return max((int(found[1]) for line in lines if (found := STEP.match(line))), default=0)

    def live_once(self, end: float) -> None:
        """Start, go beyond what was there before, live for a while, and be killed."""
        before = self.step
        # More than a while between saves, now and then less.
        lives_s = min(self.draw.expovariate(1 / 15.0), max(0.0, end - time.monotonic()))
        # How ranks wait for each other is no setting of the run: each start says it.
        comm = ["--comm", self.draw.choice(["gloo", "shm"]), "--comm-timeout", "10"]
        resume = ["--resume", str(self.folder)]
        arguments = resume if (self.folder / "config.json").exists() else self.arguments
        with started([*arguments, *comm], environment=environment_of_ranks()) as running:
            wait_until(lambda: self._is_past(before, running), START_S)
            if self._fell:
                self.lost_s.append(time.monotonic() - self._fell)
            time.sleep(lives_s)
            self._strike(running)
        self._fell = time.monotonic()
        saved = StateStore(self.folder / "checkpoints").latest() or 0
        self.lost_steps.append(self.step - saved)

    def _is_past(self, before: int, running: Running) -> bool:
        assert running.process.poll() is None, running.process.communicate()[1]
        return self.step > before

    def _strike(self, running: Running) -> None:
        what = self.draw.choices(KILLS, [5, 2, 2, 1])[0]
        worker = self.draw.choice(running.workers()[-2:])
        if what == "a worker is killed":
            os.kill(worker, signal.SIGKILL)
        elif what == "a worker is stopped":
            os.kill(worker, signal.SIGSTOP)
        elif what == "the launcher is killed":
            running.process.kill()
        else:
            running.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, errors = running.process.communicate(timeout=END_S)
        wait_until(lambda: running.members() == {}, END_S)
        assert running.process.returncode != 0, what
        self.happened[what] += 1
        with (self.folder.parent / "lives.txt").open("a") as file:
            said = (errors.splitlines() or [""])[-1]
            seconds = time.monotonic() - began
            file.write(f"step {self.step}: {what}, {seconds:.1f} s to the end: {said}\n")


def told(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in TOLD]


def superseded(folder: Path) -> list[dict[str, Any]]:
    path = folder / SUPERSEDED
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:  # a line at which the run was killed
            continue
    return [row for row in rows if "loss" in row]


def tensors(folder: Path, step: int) -> dict[str, bytes]:
    (saved,) = (folder / "checkpoints").glob(f"step-{step:08d}-*")
    return {path.name: path.read_bytes() for path in saved.glob("*.safetensors")}


def undisturbed_to(arguments: list[str], folder: Path, step: int) -> None:
    """Make the same run without any of that, up to a step, whose checkpoint it leaves."""
    with started([*arguments, "--comm", "gloo"], environment=environment_of_ranks()) as running:
        store = StateStore(folder / "checkpoints")
        while step not in store.steps():
            faulthandler.dump_traceback_later(240, exit=True)
            assert running.process.poll() is None, running.process.communicate()[1]
            time.sleep(0.2)
        running.process.kill()
        running.process.communicate(timeout=END_S)


def test_a_run_that_is_killed_at_random_for_half_an_hour_keeps_every_step_bit_for_bit(
    book: Path, tmp_path: Path, fault_seed: int, soak_minutes: float
) -> None:
    run, right = tmp_path / "run", tmp_path / "right"
    arguments = [*COMMON, "--data", str(book)]
    soak = Soak(run, [*arguments, "--out", str(run)], random.Random(f"soak {fault_seed}"))

    began = time.monotonic()
    while time.monotonic() < began + 60 * soak_minutes:
        # What watches over tests is set anew for each life: together they last longer.
        faulthandler.dump_traceback_later(400, exit=True)
        soak.live_once(began + 60 * soak_minutes)
    seconds = time.monotonic() - began
    last = StateStore(run / "checkpoints").latest()
    assert last
    StateStore(run / "checkpoints").verify()
    # The last step of all that is recorded, of which the record ends with the checkpoint's.
    recorded = [row for row in metrics(run) if row["step"] <= last]
    undisturbed_to([*arguments, "--keep", "1000", "--out", str(right)], right, last)
    faulthandler.cancel_dump_traceback_later()

    assert [row["step"] for row in recorded] == list(range(1, last + 1))
    expected = {row["step"]: told(row) for row in metrics(right)}
    for row in [*recorded, *superseded(run)]:
        if row["step"] <= last:
            assert told(row) == expected[row["step"]]
    assert tensors(run, last) == tensors(right, last)
    _tell(soak, seconds, last)


def _tell(soak: Soak, seconds: float, last: int) -> None:
    ends = sum(soak.happened.values())
    lost = sorted(soak.lost_s) or [0.0]
    kinds = ", ".join(f"{count} x {what}" for what, count in soak.happened.items())
    FIGURES.append(f"soak: {seconds / 60:.1f} minutes, {ends} ends ({kinds}), {last} steps kept")
    FIGURES.append(
        f"soak: from an end to the first new step: median {lost[len(lost) // 2]:.1f} s, most "
        f"{lost[-1]:.1f} s; steps made again: {sum(soak.lost_steps)}, at most "
        f"{max(soak.lost_steps)} after one end; each step recorded once, weights equal bit for bit"
    )
