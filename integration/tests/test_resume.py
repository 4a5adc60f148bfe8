"""Runs that are stopped, damaged or finished, and how they are taken up again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.integration.cli import main
from trainwright.integration.run_folder import RunFolder

SMALL = ["--threads-as-ranks", "--sequence-length", "16", "--global-batch", "4"]
SMALL += ["--evaluate-sequences", "4", "--sample-bytes", "4"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "däta.txt"
    path.write_text("the law holds in every layout, on every rank, at every step. " * 40)
    return path


@pytest.fixture
def finished(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "run"
    assert main(["train", *SMALL, "--data", str(data), "--steps", "3", "--out", str(folder)]) == 0
    capsys.readouterr()
    return folder


def _rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_damaged_checkpoint_is_refused_in_a_line_with_file_and_checksums(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = next((finished / "checkpoints").glob("step-*/rank-*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)

    code = main(["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "5"])

    said = capsys.readouterr().err
    assert code == 1
    assert victim.name in said
    assert "expected" in said
    assert "found" in said
    assert "Traceback" not in said
    assert len(_rows(finished)) == 3


def test_a_run_that_is_being_written_is_not_resumed_a_second_time(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "4"]

    with RunFolder(finished).lock():
        refused = main(again)
    said = capsys.readouterr().err
    accepted = main(again)

    assert refused == 2
    assert "another run is writing" in said
    assert accepted == 0


def test_a_run_stopped_before_its_first_checkpoint_starts_again(
    finished: Path, tmp_path: Path
) -> None:
    (finished / "checkpoints").rename(tmp_path / "never saved")
    assert main(["train", "--threads-as-ranks", "--resume", str(finished)]) == 0
    assert [row["step"] for row in _rows(finished)] == [1, 2, 3]
    superseded = (finished / "metrics.superseded.jsonl").read_text().splitlines()
    assert len(superseded) == 3


@pytest.mark.parametrize("tail", ["", '{"step": 4, "lo', "\n\n"])
def test_a_torn_end_of_the_metrics_is_mended(finished: Path, tail: str) -> None:
    text = (finished / "metrics.jsonl").read_text().rstrip("\n")
    (finished / "metrics.jsonl").write_text(text + ("\n" + tail if tail else ""))
    resume = ["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "4"]
    assert main(resume) == 0
    assert [row["step"] for row in _rows(finished)] == [1, 2, 3, 4]


def test_what_a_resumed_run_was_told_stays_with_it(finished: Path) -> None:
    resume = ["train", "--threads-as-ranks", "--resume", str(finished)]
    assert main([*resume, "--steps", "5", "--layout", "dp=2"]) == 0
    assert RunFolder(finished).config().steps == 5
    assert RunFolder(finished).config().layout == "dp=2"


def test_fewer_steps_than_were_made_are_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "2"]
    assert main(resume) == 2
    assert "3 steps already" in capsys.readouterr().err


def test_the_json_summary_of_a_finished_run_is_json(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--threads-as-ranks", "--resume", str(finished), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["loss"] is None
    assert summary["steps"] == 3


def test_weights_ruined_by_a_step_are_never_saved_as_success(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ruined"
    wild = ["--data", str(data), "--steps", "6", "--lr", "1e30", "--out", str(folder)]
    code = main(["train", *SMALL, *wild])
    assert code == 1
    assert "skipped" in capsys.readouterr().err
    assert not list((folder / "checkpoints").glob("step-*"))
