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
    Left,
    Server,
    Setting,
    back_to,
    begin_or_resume,
    check_checkpoints,
    drawn,
    left_by,
    run_apart,
    run_launched,
)
from tests.faulting_command import MOMENTS, Fault
from tests.faulting_session import TABLE, Row, UndisturbedRuns

pytestmark = [pytest.mark.processes, pytest.mark.fault]

CODES = {"kill": -9, "stop": None, "raise": 1, "exit": 3}
"""How the rank ends to which it happens; one that is stopped does not end by itself."""

UNUSABLE = 2
"""Says that what was given cannot be used."""


def drawn_setting(draw: random.Random) -> Setting:
    layout = draw.choices(list(LAYOUTS), [2, 3, 3, 3, 1])[0]
    return Setting(layout, draw.choice(["gloo", "shm"]))


def bound_s(fault: Fault) -> float:
    """Return how many seconds the others have: a hang is found by nothing but its time.

    Ranks that have not met have no connection whose end would tell.
    """
    is_alone = fault.moment == "start" and fault.count == 1
    return NOTICE_S + TIMEOUT_S * (fault.kind == "stop" or is_alone)


def assert_all_know(ended: Ended, fault: Fault) -> None:
    assert ended.struck, ended.text
    own = UNUSABLE if is_load_that_raises(fault) else CODES[fault.kind]
    assert ended.codes[fault.rank] == own, ended.text
    assert_others_know(ended, fault)


def is_load_that_raises(fault: Fault) -> bool:
    """Whether all ranks say of the checkpoint that was given that it was not loaded."""
    return (fault.kind, fault.moment) == ("raise", "load")


def assert_others_know(ended: Ended, fault: Fault) -> None:
    for rank, code in ended.codes.items():
        if rank != fault.rank:
            assert code == (UNUSABLE if is_load_that_raises(fault) else 1), ended.text
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


MEANT = ("collective", "microbatch", "save")
"""Moments that a run without a checkpoint comes to, when all of its ranks have met."""


@pytest.mark.parametrize("kind", CODES)
def test_the_launcher_says_which_rank_it_was_and_leaves_no_process(
    server: Server,
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    fault_seed: int,
    kind: str,
    draw_number: int,
) -> None:
    draw = random.Random(f"{fault_seed} launched {kind} {draw_number}")
    setting = drawn_setting(draw)
    right = undisturbed[setting]
    fault = drawn(draw, kind, draw.choice(MEANT), right.begun)
    run = tmp_path / "run"

    ended, code, said = run_launched(
        setting, begin_or_resume(run, book), tmp_path / "first", [fault]
    )
    newest = check_checkpoints(run)
    again = run_apart(server, setting, begin_or_resume(run, book), tmp_path / "again")

    assert ended.struck
    assert code == 1
    assert re.search(rf"\brank {fault.rank}\b", said), said
    assert ended.seconds < bound_s(fault), said
    assert set(again.codes.values()) == {0}, again.text
    assert left_by(run) == right.left
    after = f"launched: equal bit for bit, resumed from {newest}"
    TABLE.append(Row(fault, setting, ended.seconds, after))


@pytest.mark.parametrize("kind", ["kill", "stop", "exit", "raise"])
def test_with_restarts_those_that_are_left_end_the_run_as_the_serial_run_would(
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    fault_seed: int,
    kind: str,
    draw_number: int,
) -> None:
    draw = random.Random(f"{fault_seed} elastic {kind} {draw_number}")
    setting = Setting("dp=2,tp=2", draw.choice(["gloo", "shm"]))
    right = undisturbed[setting]
    fault = drawn(draw, kind, draw.choice(MEANT), right.begun)
    run = tmp_path / "run"

    begin = [*begin_or_resume(run, book), "--max-restarts", "1"]
    ended, code, said = run_launched(setting, begin, tmp_path / "first", [fault])

    assert ended.struck
    assert code == 0, said
    assert "restart 1 of 1" in said
    assert "--layout tp=2 and 4 microbatches" in said
    assert check_checkpoints(run) == STEPS
    assert_told_as(left_by(run), right.left)
    after = "the run went on with two ranks, and ended"
    TABLE.append(Row(fault, setting, ended.seconds, after))


def assert_told_as(found: Left, right: Left) -> None:
    """The steps are those of the other run, within the rounding of float64."""
    assert [row[0] for row in found.told] == list(range(1, STEPS + 1))
    for row, wanted in zip(found.told, right.told, strict=True):
        assert row == pytest.approx(wanted, rel=1e-10)
