"""The command line tool on real processes: what it computes, and how it stops."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest

from tests.running import finish, metrics, started, wait_until
from trainwright.checkpointing.state import StateStore
from trainwright.integration.cli import main, parser
from trainwright.integration.config import RunConfig
from trainwright.integration.settings.options import given_leaves

SMALL = ["--sequence-length", "32", "--global-batch", "8", "--evaluate-sequences", "16"]
SMALL += ["--sample-bytes", "8", "--dtype", "float64"]
SPARSE = ["--layout", "dp=2,cp=2,ep=2", "--model", "tiny-moe"]

pytestmark = pytest.mark.processes


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes((Path(__file__).parents[1] / "LICENSE").read_bytes())
    return path


def test_eight_processes_train_in_3d_as_one_process_with_eight_threads_does(
    tmp_path: Path, book: Path
) -> None:
    layout = ["--layout", "dp=2,tp=2,pp=2", "--steps", "4", "--zero", "1", "--data", str(book)]
    processes, threads, serial = (tmp_path / name for name in ("processes", "threads", "serial"))

    apart = ["--sequence-parallel", "--out", str(processes), "--json"]
    output, _ = finish([*layout, *SMALL, *apart])
    shared = tmp_path / "shared"
    finish([*layout, *SMALL, "--comm", "shm", "--out", str(shared)])
    finish([*layout, *SMALL, "--out", str(threads), "--comm", "threads"])
    alone = ["--layout", "dp=1", "--steps", "4", "--data", str(book), "--threads-as-ranks"]
    finish([*alone, *SMALL, "--out", str(serial)])

    for folder in (shared, threads, serial):
        for found, right in zip(metrics(processes), metrics(folder), strict=True):
            assert found["step"] == right["step"]
            assert found["tokens"] == right["tokens"] == 8 * 32
            assert found["lr"] == right["lr"]
            for key in ("loss", "grad_norm"):
                assert abs(found[key] - right[key]) <= 1e-10 * abs(right[key])
    summary = json.loads(output)
    assert summary["steps"] == summary["updates"] == 4
    assert 0 < summary["held_out_loss"] < 6
    assert 0 < summary["trigram_loss"] < summary["bigram_loss"]
    assert {"config.json", "metrics.jsonl", "loss.png", "checkpoints"} <= {
        path.name for path in processes.iterdir()
    }
    assert (processes / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert StateStore(processes / "checkpoints").latest() == 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "--layout dp=2,tp=3 --zero 1 --sequence-parallel",
            "--layout dp=2,pp=2 --zero 3 --gather unit --no-sequence-parallel",
        ),
        (
            "--layout dp=2,pp=2 --zero 3 --schedule zb-v",
            "--layout dp=4,dp_shard=2 --zero 2 --schedule interleaved-1f1b --chunks 4",
        ),
    ],
    ids=["uneven-tp-stage1-to-pp-stage3", "v-stage3-to-loops-hybrid-stage2"],
)
def test_a_run_that_is_resumed_in_another_layout_goes_on_as_if_never_stopped(
    tmp_path: Path, book: Path, before: str, after: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [
        "train",
        "--threads-as-ranks",
        "--data",
        str(book),
        *SMALL,
        "--steps",
        "6",
        "--warmup",
        "2",
    ]
    common += ["--model", "tiny-tied"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*common, "--layout", "dp=1", "--out", str(whole)]) == 0

    assert main([*common, *before.split(), "--save-every", "3", "--out", str(parts)]) == 0
    # As a crash after the first save would have left it.
    store = parts / "checkpoints"
    kept = StateStore(store)
    newest = list(store.glob("step-00000006*"))
    assert kept.steps() == [3, 6]
    assert len(newest) == 1
    newest[0].rename(tmp_path / "lost")
    capsys.readouterr()
    assert main([*common, *after.split(), "--resume", str(parts)]) == 0

    assert "going on from the checkpoint of step 3\n" in capsys.readouterr().err
    for found, right in zip(metrics(parts), metrics(whole), strict=True):
        for key in ("step", "lr", "tokens"):
            assert found[key] == right[key]
        for key in ("loss", "grad_norm"):
            assert abs(found[key] - right[key]) <= 1e-10 * abs(right[key])
    superseded = (parts / "metrics.superseded.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in superseded]
    assert [row["step"] for row in rows if "loss" in row] == [4, 5, 6]


@pytest.mark.long
def test_processes_with_cut_sequences_and_shared_experts_go_on_in_other_layouts(
    tmp_path: Path, book: Path
) -> None:
    common = ["--data", str(book), *SMALL, "--steps", "6", "--warmup", "2", "--model", "tiny-moe"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish([*common, "--layout", "dp=1", "--comm", "threads", "--out", str(whole)])
    summaries = []

    def run(*arguments: str) -> None:
        summaries.append(json.loads(finish([*arguments, "--json"])[0]))
        kept = StateStore(parts / "checkpoints")
        assert kept.latest() == 6
        # As a crash after the first save would have left it.
        for step in kept.steps()[1:]:
            for folder in (parts / "checkpoints").glob(f"step-{step:08}*"):
                folder.rename(tmp_path / f"{folder.name}-{len(summaries)}")

    run(*common, *SPARSE, "--save-every", "2", "--out", str(parts))
    other = "--layout tp=2,pp=2 --sequence-parallel --zero 1 --comm shm"
    run("--resume", str(parts), *other.split())
    other = "--layout dp=2,cp=2,ep=4 --no-sequence-parallel --zero 3 --context ulysses"
    run("--resume", str(parts), *other.split(), "--recompute", "full")

    for found, right in zip(metrics(parts), metrics(whole), strict=True):
        for key in ("loss", "grad_norm"):
            assert abs(found[key] - right[key]) <= 1e-10 * abs(right[key])
    assert len({summary["sample"] for summary in summaries}) == 1
    losses = [summary["held_out_loss"] for summary in summaries]
    assert max(losses) - min(losses) <= 1e-12 * losses[0]


@pytest.mark.parametrize(
    "layout", [["--layout", "dp=2,pp=2"], pytest.param(SPARSE, marks=pytest.mark.long)]
)
def test_a_killed_worker_stops_all_within_seconds_and_is_named(
    tmp_path: Path, book: Path, layout: list[str]
) -> None:
    run = tmp_path / "run"
    arguments = [*layout, "--steps", "100000", "--data", str(book), *SMALL]
    with started([*arguments, "--out", str(run)]) as running:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(metrics(run)) > 1, 120)
        os.kill(running.workers()[2], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = running.process.communicate(timeout=60)
        seconds = time.monotonic() - killed
        wait_until(lambda: running.members() == {}, 10)
    assert running.process.returncode == 1
    assert "rank 2 failed" in errors
    assert "SIGKILL" in errors
    assert seconds < 40


def test_workers_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path, book: Path) -> None:
    run = tmp_path / "run"
    arguments = ["--layout", "dp=2", "--steps", "100000", "--data", str(book), *SMALL]
    with started([*arguments, "--out", str(run)]) as running:
        wait_until(lambda: (run / "metrics.jsonl").exists(), 120)
        assert len(running.workers()) == 2
        running.process.kill()
        wait_until(lambda: running.members() == {}, 20)


@pytest.mark.parametrize(
    ("sign", "layout"),
    [
        (signal.SIGINT, ["--layout", "dp=2"]),
        (signal.SIGTERM, ["--layout", "dp=2"]),
        pytest.param(signal.SIGTERM, SPARSE, marks=pytest.mark.long),
    ],
)
def test_a_signal_leaves_no_process_behind_and_keeps_the_last_checkpoint(
    tmp_path: Path, book: Path, sign: signal.Signals, layout: list[str]
) -> None:
    run = tmp_path / "run"
    arguments = [*layout, "--steps", "100000", "--save-every", "2", "--data", str(book)]
    with started([*arguments, *SMALL, "--out", str(run)]) as running:
        wait_until(lambda: StateStore(run / "checkpoints").latest() is not None, 120)
        running.process.send_signal(sign)
        _, errors = running.process.communicate(timeout=60)
        wait_until(lambda: running.members() == {}, 10)
    assert running.process.returncode == 128 + sign
    store = StateStore(run / "checkpoints")
    store.verify(store.latest())
    assert f"go on from step {store.latest()} with: trainwright train --resume {run}" in errors
    assert "Traceback" not in errors


@pytest.mark.long
@pytest.mark.parametrize("later_s", [0.0, 0.5, 1.5])
def test_a_terminals_ctrl_c_while_ranks_are_being_started_ends_all_in_a_line(
    tmp_path: Path, book: Path, later_s: float
) -> None:
    run = tmp_path / "run"
    arguments = ["--layout", "dp=2", "--steps", "100000", "--data", str(book), *SMALL]
    with started([*arguments, "--out", str(run)]) as running:
        wait_until(lambda: (run / "config.json").exists(), 120)
        time.sleep(later_s)
        os.killpg(running.process.pid, signal.SIGINT)
        _, errors = running.process.communicate(timeout=60)
        wait_until(lambda: running.members() == {}, 10)
    assert running.process.returncode == 128 + signal.SIGINT
    assert f"trainwright train --resume {run}" in errors
    assert "Traceback" not in errors


def _commands_of_the_readme() -> list[str]:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith("trainwright ")]


@pytest.mark.parametrize("command", _commands_of_the_readme())
def test_every_command_of_the_readme_has_options_and_values_that_there_are(command: str) -> None:
    options = parser().parse_args(shlex.split(command, comments=True)[1:])

    leaves = given_leaves(options) if options.command == "train" else {}

    assert (
        RunConfig.of(**{**leaves, "model": "tiny"}).leaves().items()
        >= {name: value for name, value in leaves.items() if name != "model"}.items()
    )


def test_the_readme_shows_commands() -> None:
    shown = {command.split()[1] for command in _commands_of_the_readme()}
    assert shown >= {"train", "evaluate", "generate", "export", "report"}
