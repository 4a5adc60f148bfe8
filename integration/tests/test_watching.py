"""Looking on changes nothing of a run, and tells what there is to see."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from rich.console import Console
from torch import nn

from trainwright.collectives import LocalWorld
from trainwright.integration import measuring
from trainwright.integration.cli import main
from trainwright.integration.display import display, duration
from trainwright.integration.errors import ConfigError
from trainwright.integration.evaluating import EvaluateEvery
from trainwright.integration.flops import Products, Spans
from trainwright.integration.memory_kinds import peak_bytes, state_bytes
from trainwright.integration.recipe import StepRecord
from trainwright.integration.report import page, read_run
from trainwright.integration.settings import WatchingSettings
from trainwright.integration.telling import Pace, Telling, Told
from trainwright.integration.tensorboard import check_tensorboard
from trainwright.stability_guards import Intervention, MemoryJournal, Positions, Verdict

SMALL = ["--layout", "dp=2,pp=2", "--zero", "3", "--global-batch", "8", "--microbatches", "2"]
SMALL += ["--sequence-length", "16", "--evaluate-sequences", "8", "--sample-bytes", "0"]
SMALL += ["--steps", "4", "--save-every", "2", "--threads-as-ranks"]
LOOKING = ["--evaluate-every", "2", "--measure-every", "2", "--tensorboard"]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text("the law holds on every rank, looked at or not. " * 100)
    return path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    """A run that was looked at in every way."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("runs") / "seen"
    assert main(["train", *SMALL, *LOOKING, "--data", str(book), "--out", str(folder)]) == 0
    return folder


def rows_of(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_that_is_looked_at_is_bit_for_bit_one_that_is_not(
    seen: Path, book: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    unseen = ["--measure-every", "0", "--data", str(book), "--out", str(alone)]
    assert main(["train", *SMALL, *unseen]) == 0

    assert not (alone / "measured.jsonl").exists()
    assert not (alone / "tensorboard").exists()
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "held_out_loss")
    found = [{k: row[k] for k in kept if k in row} for row in rows_of(seen)]
    right = [{k: row[k] for k in kept if k in row} for row in rows_of(alone)]
    assert [row for row in found if row not in right] == [
        {"step": 2, "held_out_loss": found[2]["held_out_loss"]}
    ]
    assert [row for row in right if row not in found] == []
    assert digests(seen) == digests(alone) != {}


def digests(folder: Path) -> dict[str, str]:
    """The digest of each file of tensors, by step and name."""
    return {
        f"{path.parent.name[:13]} {path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("checkpoints/*/*.safetensors")
    }


def test_measured_steps_tell_times_memory_and_the_pipeline_of_every_rank(seen: Path) -> None:
    second, last = rows_of(seen, "measured.jsonl")
    for row in (second, last):
        assert row["ranks"] == [0, 1, 2, 3]
        assert row["world"] == 4
        for whole, compute, wait in zip(
            row["step_s"], row["compute_s"], row["wait_s"], strict=True
        ):
            assert 0 < compute <= compute + wait <= whole
        slowest = row["slowest"]
        assert slowest["compute_s"] == pytest.approx(max(row["compute_s"]), abs=2e-6)
        assert row["compute_s"][slowest["rank"]] == max(row["compute_s"])
        # Stage 3: each data rank has half of its pipeline stage's states, AdamW's two and master.
        memory = row["memory"]
        for gradient, optimizer in zip(memory["gradients"], memory["optimizer"], strict=True):
            assert 3 * gradient <= optimizer <= 3.1 * gradient
        assert "ranks are threads" in row["memory_note"]
        assert row["layout"] == "dp=2,pp=2"
        lanes = row["timeline"]
        assert [[bar[0] for bar in lane if bar[0] in "FB"] for lane in lanes] == [
            ["F", "F", "B", "B"],
            ["F", "B", "F", "B"],
        ]
        starts = {(bar[0], bar[1], bar[2]): bar[3] for lane in lanes for bar in lane}
        stops = {(bar[0], bar[1], bar[2]): bar[4] for lane in lanes for bar in lane}
        for microbatch in (0, 1):  # one clock: what a rank needs has ended on the other
            assert stops["F", 0, microbatch] < stops["F", 1, microbatch]
            assert starts["B", 1, microbatch] < starts["B", 0, microbatch]
    told = page(read_run(seen))
    assert "Memory by kind" in told
    assert ">ideal<" in told


def test_a_resumed_run_forgets_what_was_told_of_steps_that_it_makes_again(
    seen: Path, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (seen / "measured.jsonl").open("a") as file:
        file.write('{"step": 4}\n{"step": 8, "torn')
    (seen / "summary.json").write_text("{}")
    shutil.rmtree(next(seen.glob("checkpoints/step-*4-*")))
    arguments = ["train", "--threads-as-ranks", "--resume", str(seen), "--steps", "5"]
    assert main(arguments) == 0

    rows = rows_of(seen)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 5]
    assert [row["step"] for row in rows_of(seen, "measured.jsonl")] == [2, 4]
    events = EventAccumulator(str(seen / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss/train")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("loss/held_out")] == [2, 4, 5]


PRODUCTS = Products(attention=4 * 10**8, feed_forward=6 * 10**8, scores=(), head=0)
"""6e9 FLOPs a token."""


def record(step: int, verdict: Verdict = Verdict.CONTINUE, **more: float) -> StepRecord:
    values: dict[str, Any] = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "tokens": 1024}
    values |= {"end": 100, "spans": Spans(200, 200 * 16)}
    return StepRecord(step, **{**values, **more}, seconds=0.5, verdict=verdict, microbatches=2)


def journal(reason: str) -> MemoryJournal:
    where = {"step": 1, "updates": 0, "batch": Positions(), "left_out": Positions()}
    return MemoryJournal((Intervention(number=0, verdict=Verdict.SKIP, reason=reason, **where),))


def shown(*, terminal: bool) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=180, legacy_windows=False, no_color=True
    )
    with display(100, 0, console) as watcher:
        telling = Telling(
            [watcher],
            Pace(PRODUCTS, 4.8e12),
            lambda: 3 * 10**9,
            journal("loss [red]high[/red] at 7"),
        )
        for step in range(1, 8):
            telling(record(step))
        telling.evaluated(7, 2.25, 1.5)
        telling(record(8, Verdict.SKIP, end=101))
        telling(record(101, end=101, loss=float("nan")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_has_lines_with_loss_pace_utilization_memory_and_interventions() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0].startswith(
        "step 5/100  loss 2.500  norm 0.50  2,048 tokens/s  MFU 50.0 %  3.0 GB  "
    )
    assert lines[0].endswith(" left")
    assert lines[1] == "step 7/100  held-out loss 2.250  1.5 s"
    assert lines[2].endswith("SKIP: loss [red]high[/red] at 7")
    assert lines[3].startswith("step 101/101  loss nan")
    assert lines[3].endswith("0 s left")
    assert len(lines) == 4


def test_a_terminal_has_a_bar_with_the_held_out_loss_and_interventions_above_it() -> None:
    text = shown(terminal=True)
    assert "step 8: SKIP: loss [red]high[/red] at 7" in text
    assert "held-out 2.250" in text
    assert "MFU 50.0 %" in text
    assert "101/101" in text


def test_durations_are_told_in_seconds_minutes_or_hours() -> None:
    told = [duration(seconds) for seconds in (0.0, 0.2, 99.0, 100.0, 3599.2, 7384.0)]
    assert told == ["0 s", "1 s", "99 s", "1:40", "1:00:00", "2:03:04"]


def test_utilization_is_told_only_where_the_peak_is_known() -> None:
    assert Pace(PRODUCTS, None).mfu(record(1)) is None
    assert Pace(PRODUCTS, 4.8e12).mfu(record(1)) == 0.5
    assert Pace(PRODUCTS, 4.8e12).mfu(attrs.evolve(record(1), spans=Spans(100, 100))) == 0.25
    seen: list[Told] = []
    watcher = SimpleNamespace(stepped=seen.append)
    Telling([watcher], Pace(PRODUCTS, None), lambda: 5, MemoryJournal())(record(1))
    assert attrs.astuple(seen[0], recurse=False)[1:] == (None, 5, "")
    assert peak_bytes(torch.device("cpu")) > 10**7


def test_the_held_out_loss_is_found_at_due_steps_that_are_not_taken_back() -> None:
    told: list[tuple[int, float]] = []
    held_out = EvaluateEvery(3, lambda: 1.5, lambda step, loss, _: told.append((step, loss)))
    for step in range(1, 10):
        held_out(record(step, Verdict.ROLLBACK if step == 3 else Verdict.CONTINUE, end=9))
    held_out(record(3, Verdict.SKIP, end=9))
    assert told == [(6, 1.5), (3, 1.5)]
    never = attrs.evolve(held_out, every=0)
    never(record(6))
    assert len(told) == 2


def test_bytes_of_states_count_each_storage_once() -> None:
    flat = torch.zeros(12)
    model = nn.Linear(3, 2)  # 8 weights of 4 bytes
    model.weight = nn.Parameter(flat[:6].view(2, 3))
    model.bias = nn.Parameter(flat[6:8])
    master = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    master.grad = torch.zeros(8, dtype=torch.float64)
    optimizer = torch.optim.AdamW([master])
    pieces: Mapping[str, Any] = {"all": SimpleNamespace(parameter=master)}
    before = state_bytes([model], pieces, optimizer)
    optimizer.step()
    model.weight.grad = torch.zeros(2, 3)

    after = state_bytes([model, model], pieces, optimizer)

    assert before == {"weights": 48, "gradients": 64, "optimizer": 64}
    assert after == {"weights": 48, "gradients": 64 + 24, "optimizer": 3 * 64 + 4}


def test_of_a_large_world_evenly_spread_ranks_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST_RANKS", 3)

    def work(world: Any) -> tuple[int | None, Any]:
        asked = measuring._spread(world)
        found = measuring._slowest(world, 0.25 if world.rank == 4 else world.rank / 100)
        return None if asked is None else asked.size, found

    asked, slowest = zip(*LocalWorld(7).run(work), strict=True)

    assert asked == (3, None, None, 3, None, None, 3)
    assert list(slowest) == [{"rank": 4, "compute_s": 0.25}] * 7


def test_measurements_are_about_twenty_and_timelines_fewer() -> None:
    usual = WatchingSettings()
    for steps, every in ((5, 1), (330, 16), (100_000, 500)):
        assert usual.every(steps) == every
    measured = [step for step in range(1, 331) if usual.is_measured(step, 330)]
    assert measured == list(range(16, 331, 16))
    kept = [step for step in measured if usual.keeps_timeline(step, 330, 330)]
    assert kept == [16, 32, 64, 128, 256, 320]
    # Of the steps that skipped ones make necessary, the last is kept, not all of them.
    assert [step for step in range(320, 401, 16) if usual.keeps_timeline(step, 330, 400)] == [400]
    assert not any(WatchingSettings(measure_every=0).is_measured(step, 9) for step in range(1, 10))


def test_tensorboard_that_is_missing_is_named_with_what_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trainwright\[tensorboard\]'"):
        check_tensorboard()
