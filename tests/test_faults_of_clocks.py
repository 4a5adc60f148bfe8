"""Clocks that jump: nothing that is computed, waited for or ordered depends on them."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from tests.faulting import (
    STEPS,
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

DAY_S = 86400.0
HOUR_S = 3600.0


@pytest.mark.parametrize("seconds", [DAY_S, -HOUR_S])
def test_a_clock_that_jumps_changes_neither_steps_nor_times_nor_the_order_of_checkpoints(
    server: Server,
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    fault_seed: int,
    draw_number: int,
    seconds: float,
) -> None:
    draw = random.Random(f"{fault_seed} clock {seconds} {draw_number}")
    setting = Setting("dp=2,pp=2", draw.choice(["gloo", "shm"]))
    right = undisturbed[setting]
    other = drawn(draw, "clock", "collective", right.begun)
    # What is told is told by the first rank, and another one's clock is enough to disagree.
    faults = [Fault("clock", "collective", 0, right.begun[0]["collective"] // 3, seconds)]
    faults += [Fault("clock", "collective", max(other.rank, 1), other.count, -seconds)]
    run = tmp_path / "run"

    ended = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "first", faults)

    assert set(ended.codes.values()) == {0}, ended.text
    assert left_by(run) == right.left
    assert check_checkpoints(run) == STEPS
    for row in metrics(run):
        assert 0 < row["step_s"] < HOUR_S / 2
        assert row["tokens_per_s"] > 0
    left = [int(found) for found in re.findall(r"(\d+) s left", ended.errors[0])]
    assert left, ended.errors[0]
    assert max(left) < HOUR_S / 2
    assert not re.search(r"(\d\d+ min|\d h|-\d+ s) left", ended.errors[0])
    TABLE.extend(Row(fault, setting, ended.seconds, "nothing changed") for fault in faults)
