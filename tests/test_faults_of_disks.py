"""Disks that are full or slow: the save fails for all, and what was saved before stays."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from tests.faulting import (
    STEPS,
    TIMEOUT_S,
    Server,
    Setting,
    begin_or_resume,
    check_checkpoints,
    drawn,
    left_by,
    run_apart,
)
from tests.faulting_command import Fault
from tests.faulting_session import TABLE, Row, UndisturbedRuns
from tests.running import metrics

pytestmark = [pytest.mark.processes, pytest.mark.fault]

LAYOUTS = ("dp=2,tp=2", "dp=2,pp=2", "tp=2,pp=2")
MEBIBYTE = 1 << 20


def drawn_case(draw: random.Random, kind: str, runs: UndisturbedRuns) -> tuple[Setting, Fault]:
    setting = Setting(draw.choice(LAYOUTS), draw.choice(["gloo", "shm"]))
    return setting, drawn(draw, kind, "save", runs[setting].begun)


def test_a_disk_that_is_full_fails_the_save_on_all_ranks_and_keeps_the_one_before(
    server: Server,
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    fault_seed: int,
    draw_number: int,
) -> None:
    draw = random.Random(f"{fault_seed} full {draw_number}")
    setting, fault = drawn_case(draw, "full", undisturbed)
    run = tmp_path / "run"

    ended = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "first", [fault])
    newest = check_checkpoints(run)
    again = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "again")

    assert ended.struck
    assert set(ended.codes.values()) == {1}, ended.text
    for text in ended.errors.values():
        assert re.search(rf"rank {fault.rank}\b.*No space left on device", text), ended.text
    assert set(again.codes.values()) == {0}, again.text
    assert left_by(run) == undisturbed[setting].left
    TABLE.append(Row(fault, setting, ended.seconds, f"equal, resumed from {newest}"))


@pytest.mark.parametrize("seconds", [TIMEOUT_S * 0.4, TIMEOUT_S * 2.0])
def test_a_disk_that_is_slow_is_waited_for_until_the_timeout_and_then_named(
    server: Server,
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    fault_seed: int,
    draw_number: int,
    seconds: float,
) -> None:
    draw = random.Random(f"{fault_seed} slow {seconds} {draw_number}")
    setting, fault = drawn_case(draw, "slow", undisturbed)
    fault = attrs.evolve(fault, seconds=seconds)
    run = tmp_path / "run"

    ended = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "first", [fault])
    newest = check_checkpoints(run)
    again = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "again")

    assert ended.struck
    codes = set(ended.codes.values())
    # To be waited for is no fault; for how long is a setting.
    assert codes == ({0} if seconds < TIMEOUT_S else {1}), ended.text
    if codes == {1}:
        for rank, text in ended.errors.items():
            # The slow one finds that the others have gone.
            blamed = rf"rank {fault.rank}\b" if rank != fault.rank else r"rank \d+ "
            assert re.search(f"trainwright: .*{blamed}", text), ended.text
    assert set(again.codes.values()) == {0}, again.text
    assert left_by(run) == undisturbed[setting].left
    after = "waited for" if codes == {0} else f"equal, resumed from {newest}"
    TABLE.append(Row(fault, setting, ended.seconds, after))


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """Mount a disk of that size; skip where that is not allowed."""
    folder.mkdir()
    option = f"size={mebibytes}m"
    mount = ["mount", "-t", "tmpfs", "-o", option, "trainwright-test", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)
    return ballast


def test_a_real_disk_that_runs_full_ends_the_run_on_all_ranks_and_loses_no_step(
    server: Server, undisturbed: UndisturbedRuns, book: Path, tmp_path: Path
) -> None:
    setting = Setting("dp=2,tp=2", "gloo")
    right = undisturbed[setting]
    used = sum(path.stat().st_size for path in right.folder.rglob("*") if path.is_file())
    with small_disk(tmp_path / "disk", 2 * used // MEBIBYTE + 2) as disk:
        run = disk / "run"
        filled: list[Path] = []

        def watch() -> None:
            end = time.monotonic() + 120
            while not any(row["step"] >= 3 for row in metrics(run)) and time.monotonic() < end:
                time.sleep(0.005)
            filled.append(fill(disk))

        thread = threading.Thread(target=watch)
        thread.start()
        ended = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "first")
        thread.join()
        filled[0].unlink()
        newest = check_checkpoints(run)
        again = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "again")
        left = left_by(run)
        shutil.rmtree(run)

    assert newest in (2, 4)
    assert set(ended.codes.values()) == {1}, ended.text
    for text in ended.errors.values():
        assert re.search(r"rank \d.*(No space left on device|bytes left)", text), ended.text
    assert set(again.codes.values()) == {0}, again.text
    assert left == right.left
    assert [row[0] for row in left.told] == list(range(1, STEPS + 1))
