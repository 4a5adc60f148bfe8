"""Runs that are stopped, damaged or finished, and how they are taken up again."""

from __future__ import annotations

import errno
import functools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainwright.checkpointing import CheckpointingWarning, LocalFiles, StateStore
from trainwright.checkpointing.testing.failing import FailingFiles
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import numerics, train_command, worker
from trainwright.integration.cli import main
from trainwright.integration.config import RunConfig
from trainwright.integration.data import read_corpus
from trainwright.integration.errors import ConfigError, DataError
from trainwright.integration.guarding import GuardPlan
from trainwright.integration.run_folder import WRITER, RunFolder
from trainwright.integration.stopping import STOPPED, StopWhenAsked
from trainwright.integration.worker import check_same_data, check_same_guards
from trainwright.precision import DynamicLossScaler
from trainwright.stability_guards import FileJournal, Positions, never

SMALL = ["--threads-as-ranks", "--sequence-length", "16", "--global-batch", "4"]
SMALL += ["--evaluate-sequences", "4", "--sample-bytes", "4"]
STRICT = ["--save-every", "1", "--keep", "1", "--guards", "none"]
"""One checkpoint stays, and none for rollbacks."""


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
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if "loss" in (row := json.loads(line))]


def test_a_damaged_checkpoint_is_refused_in_a_line_with_file_and_checksums(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim = next((finished / "checkpoints").glob("step-*/rank-*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-5] ^= 1
    victim.write_bytes(content)

    code = main(["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "5"])

    said = capsys.readouterr().err
    assert code == 2
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


def test_the_ranks_of_a_killed_starter_are_waited_for(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "4"]
    monkeypatch.setattr("trainwright.integration.worker.PATIENCE_S", 0.1)

    with RunFolder(finished).lock(WRITER):
        refused = main(again)
    said = capsys.readouterr().err
    accepted = main(again)

    assert refused == 2
    assert f"process {os.getpid()} on" in said
    assert accepted == 0


def test_a_run_goes_on_with_its_own_data_alone(
    finished: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", "--threads-as-ranks", "--resume", str(finished)]
    moved = data.rename(data.with_name("elsewhere.txt"))
    assert main([*resume, "--steps", "4", "--data", str(moved)]) == 0
    moved.write_text(moved.read_text().replace("law", "LAW"))
    capsys.readouterr()

    refused = main([*resume, "--steps", "5"])
    said = capsys.readouterr().err
    steps_then = len(_rows(finished))
    allowed = main([*resume, "--steps", "5", "--allow-other-data"])
    afterwards = main([*resume, "--steps", "6"])

    assert refused == 2
    assert "is not the data that the run" in said
    assert "--allow-other-data" in said
    assert steps_then == 4
    assert (allowed, afterwards) == (0, 0)
    assert [row["step"] for row in _rows(finished)] == [1, 2, 3, 4, 5, 6]


def test_checkpoints_of_another_run_are_neither_resumed_nor_removed(
    finished: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    assert main(["train", *SMALL, "--data", str(data), "--steps", "2", "--out", str(other)]) == 0
    mine = next((other / "checkpoints").glob("step-*"))
    theirs = next((finished / "checkpoints").glob("step-*"))
    theirs.rename(other / "checkpoints" / theirs.name)
    resume = ["train", "--threads-as-ranks", "--resume", str(other)]

    with pytest.warns(CheckpointingWarning, match="1 checkpoints of other runs"):
        assert main([*resume, *STRICT, "--steps", "4"]) == 0
    left = {path.name for path in (other / "checkpoints").iterdir()}
    for path in (other / "checkpoints").glob("step-00000004*"):
        path.rename(tmp_path / path.name)
    capsys.readouterr()
    refused = main([*resume, "--steps", "5"])

    assert [row["step"] for row in _rows(other)] == [1, 2, 3, 4]
    assert mine.name not in left
    assert theirs.name in left
    assert len(left) == 2
    assert refused == 2
    assert "complete: step 3 of run" in capsys.readouterr().err


def test_a_run_that_is_stopped_while_its_loss_scale_falls_is_kept_and_goes_on_falling(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "falling"
    made: list[DynamicLossScaler] = []
    asked = StopWhenAsked()
    asked.ask()

    def kept(*values: Any, **options: Any) -> DynamicLossScaler:
        made.append(DynamicLossScaler(*values, **options))
        return made[-1]

    monkeypatch.setattr(numerics, "DynamicLossScaler", kept)
    steep = ["--dtype", "float16", "--initial-scale", str(2.0**24)]
    begun = ["train", *SMALL, *steep, "--data", str(data), "--out", str(folder)]
    going = ["train", "--threads-as-ranks", "--resume", str(folder), "--steps", "3"]

    with monkeypatch.context() as stopping:
        stopping.setattr(train_command, "_stop", lambda *_: asked)
        assert main([*begun, "--steps", "3"]) == STOPPED
    assert [scaler.get_scale() for scaler in made] == [2.0**23]
    assert main(going) == 0

    verdicts = [row.get("verdict") for row in _rows(folder)]
    skipped = verdicts.count("SKIP")
    assert 1 < skipped < 20
    assert verdicts == ["SKIP"] * skipped + [None] * 3
    assert made[1].get_scale() == 2.0 ** (24 - skipped)
    assert StateStore(folder / "checkpoints").steps() == [1, skipped + 3]


def test_the_last_checkpoints_and_every_nth_stay(tmp_path: Path, data: Path) -> None:
    folder = tmp_path / "kept"
    saving = ["--save-every", "1", "--keep", "2", "--keep-every", "3", "--steps", "8"]
    assert main(["train", *SMALL, *saving, "--data", str(data), "--out", str(folder)]) == 0
    assert StateStore(folder / "checkpoints").steps() == [3, 6, 7, 8]


@pytest.mark.parametrize("saving", ["--async-save", "--no-async-save"])
def test_a_save_that_fails_ends_the_run_with_the_checkpoint_before_it(
    tmp_path: Path,
    data: Path,
    saving: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    files = FailingFiles(LocalFiles(), "rename", full, after=1)
    monkeypatch.setattr(worker, "StateStore", functools.partial(StateStore, files=files))
    folder = tmp_path / "full"
    steps = ["--layout", "dp=2", "--steps", "4", "--save-every", "1", saving]

    code = main(["train", *SMALL, *steps, "--data", str(data), "--out", str(folder)])

    assert code == 1
    assert "step 2 was not saved" in capsys.readouterr().err
    assert StateStore(folder / "checkpoints").steps() == [1]
    assert len(_rows(folder)) == (2 if saving == "--no-async-save" else 3)


def test_ranks_that_read_different_data_all_say_so(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        path = tmp_path / f"data{comm.rank % 2}.txt"
        path.write_text(f"text of rank {comm.rank % 2} " * 40)
        comm.barrier()
        with pytest.raises(DataError, match=rf"different data; rank {comm.rank} read"):
            check_same_data(comm, read_corpus(path))

    LocalWorld(3).run(work)


def test_ranks_that_have_different_guards_all_say_so() -> None:
    def work(world: Communicator) -> str:
        exclude = Positions([(world.rank // 2, 7)])
        parts: Any = SimpleNamespace(guards=GuardPlan(never(), exclude=exclude), config=RunConfig())
        with pytest.raises(ConfigError) as caught:
            check_same_guards(world, parts)
        return str(caught.value)

    assert all("every host the same files" in m for m in LocalWorld(4, timeout_s=20.0).run(work))


def test_a_run_stopped_before_its_first_checkpoint_starts_again(
    finished: Path, tmp_path: Path
) -> None:
    (finished / "checkpoints").rename(tmp_path / "never saved")
    assert main(["train", "--threads-as-ranks", "--resume", str(finished)]) == 0
    assert [row["step"] for row in _rows(finished)] == [1, 2, 3]
    superseded = (finished / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in superseded] == [1, 2, 3, 3]


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
    assert RunFolder(finished).config().parallel.layout == "dp=2"


def test_fewer_steps_than_were_made_are_refused(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = ["train", "--threads-as-ranks", "--resume", str(finished), "--steps", "2"]
    assert main(resume) == 2
    assert "3 updates already" in capsys.readouterr().err


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
    assert "21 in a row" in capsys.readouterr().err
    assert not list((folder / "checkpoints").glob("step-*"))


def test_the_text_of_a_batch_that_was_skipped_is_shown_and_can_be_left_out(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, exclude = tmp_path / "run", tmp_path / "exclude.json"
    wild = ["--data", str(data), "--steps", "3", "--lr", "1e30", "--out", str(folder)]
    assert main(["train", *SMALL, *wild]) == 1
    capsys.readouterr()

    assert main(["data", "show", str(folder), "--step", "2", "--json"]) == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    journalled = FileJournal(folder / "journal.jsonl").entries[0]
    assert [row["position"] for row in rows] == list(range(*journalled.batch.spans[0]))
    assert all(row["text"] in data.read_text() for row in rows)
    exclude.write_text(json.dumps([row["position"] for row in rows]))
    again = ["--data", str(data), "--steps", "2", "--exclude", str(exclude)]
    assert main(["train", *SMALL, *again, "--out", str(tmp_path / "again")]) == 0
    assert main(["data", "show", str(folder), "--step", "1"]) == 2
    assert "intervened at steps [2, 3, 4" in capsys.readouterr().err


def test_a_run_goes_on_with_other_guards_which_begin_anew(tmp_path: Path, data: Path) -> None:
    folder, guards = tmp_path / "run", tmp_path / "guards.json"
    # As many guards as the default has, so that their number tells nothing.
    four: dict[str, Any] = {"stall": {}, "spike": {}, "joint-spike": {}, "non-finite": {}}
    guards.write_text(json.dumps({"guards": four}))
    begin = ["train", *SMALL, "--data", str(data), "--steps", "2", "--out", str(folder)]
    assert main(begin) == 0

    for steps, other in enumerate(["none", str(guards), "default"], start=3):
        again = ["--resume", str(folder), "--steps", str(steps), "--guards", other]
        assert main(["train", "--threads-as-ranks", *again]) == 0

    assert [row["step"] for row in _rows(folder)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("tail", "code", "message"),
    [
        (b'{"number": 0, "verd', 0, ""),
        (b"{}\n", 1, "line 1 of"),
        (b"\xff\xfe\n", 1, "cannot be read"),
    ],
)
def test_a_torn_end_of_the_journal_is_no_entry_and_a_damaged_line_ends_the_run_in_a_line(
    finished: Path,
    tail: bytes,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (finished / "journal.jsonl").write_bytes(tail)
    resume = ["--resume", str(finished), "--steps", "4", "--layout", "dp=2"]

    assert main(["train", "--threads-as-ranks", *resume]) == code

    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert len(_rows(finished)) == 4 - code


def test_a_journal_without_its_run_is_taken_for_a_run_and_not_adopted(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("")

    assert main(["train", *SMALL, "--data", str(data), "--out", str(folder)]) == 2

    assert "already holds a run" in capsys.readouterr().err


def test_a_run_that_never_intervened_and_a_folder_without_one_have_no_data_to_show(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in finished.iterdir())

    assert main(["data", "show", str(finished)]) == 2
    assert "it never intervened" in capsys.readouterr().err
    assert main(["data", "show", str(tmp_path / "nothing"), "--step", "3"]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert sorted(path.name for path in finished.iterdir()) == before


def test_no_line_is_set_aside_of_metrics_that_have_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.touch()

    folder.rewind(0)

    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
