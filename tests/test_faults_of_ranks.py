"""Ranks that die, hang or fail at a drawn moment: what the others do, and what is lost."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import pytest

from tests.faulting import (
    LAYOUTS,
    NOTICE_S,
    STEPS,
    TIMEOUT_S,
    Ended,
    Server,
    Setting,
    back_to,
    check_checkpoints,
    drawn,
    left_by,
    run_apart,
)
from tests.faulting_command import MOMENTS, Fault
from tests.faulting_session import TABLE, Row, UndisturbedRuns

pytestmark = [pytest.mark.processes, pytest.mark.fault]

CODES = {"kill": -9, "stop": None, "raise": 1, "exit": 3}
"""How the rank ends to which it happens; one that is stopped does not end by itself."""


def drawn_setting(draw: random.Random) -> Setting:
    layout = draw.choices(list(LAYOUTS), [3, 3, 3, 1])[0]
    return Setting(layout, draw.choice(["gloo", "shm"]))


def begin_or_resume(run: Path, book: Path) -> list[str]:
    if (run / "config.json").exists():
        return ["--resume", str(run)]
    return ["--data", str(book), "--out", str(run)]


def bound_s(fault: Fault) -> float:
    """Return how many seconds the others have: a hang is found by nothing but its time.

    Ranks that have not met have no connection whose end would tell.
    """
    is_alone = fault.moment == "start" and fault.count == 1
    return NOTICE_S + TIMEOUT_S * (fault.kind == "stop" or is_alone)


def assert_all_know(ended: Ended, fault: Fault) -> None:
    assert ended.struck, ended.text
    assert ended.codes[fault.rank] == CODES[fault.kind], ended.text
    for rank, code in ended.codes.items():
        if rank != fault.rank:
            assert code == 1, ended.text
            assert re.search(rf"\branks? {fault.rank}\b", ended.errors[rank]), ended.text
    if fault.kind == "raise":
        cause = rf"PlantedError(: |\(')planted in {fault.moment} {fault.count}\b"
        for text in ended.errors.values():
            assert re.search(cause, text), ended.text
    assert ended.seconds < bound_s(fault), ended.text


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", CODES)
def test_ranks_that_nobody_watches_end_within_seconds_and_go_on_bit_for_bit(
    server: Server,
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    fault_seed: int,
    kind: str,
    moment: str,
    draw_number: int,
) -> None:
    draw = random.Random(f"{fault_seed} {kind} {moment} {draw_number}")
    setting = drawn_setting(draw)
    right = undisturbed[setting]
    run = tmp_path / "run"
    if moment == "load":
        shutil.copytree(right.folder, run)
        back_to(run, STEPS - 2)
    counts = right.resumed if moment == "load" else right.begun
    fault = drawn(draw, kind, moment, counts)

    ended = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "first", [fault])
    newest = check_checkpoints(run)
    again = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "again")

    assert_all_know(ended, fault)
    assert set(again.codes.values()) == {0}, again.text
    assert left_by(run) == right.left
    TABLE.append(Row(fault, setting, ended.seconds, f"equal bit for bit, resumed from {newest}"))
