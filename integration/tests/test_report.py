"""The page of a run: whole, self-contained, and true, whatever is in the folder."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.integration.cli import main
from trainwright.integration.errors import RunFolderError
from trainwright.integration.report import page, read_run
from trainwright.integration.report.chart import Chart, Curve, draw
from trainwright.integration.report.pipeline import Bar, busy_share, ideal_of, lanes_of
from trainwright.integration.report.reading import Series
from trainwright.integration.report.scales import scale_of, short, tick_texts
from trainwright.integration.report.thinning import course, thin
from trainwright.pipeline_schedules import one_f_one_b, simulate

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \" ' & \x00 \ud800"
VOID = {"meta", "input", "br", "hr", "img", "link"}


class Parsed(HTMLParser):
    """Tags and attributes of a page; raises where elements do not close in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.seen)


def row(step: int, loss: float | None, **more: object) -> dict[str, Any]:
    values = {"grad_norm": 0.5, "lr": 1e-3, "tokens": 64, "tokens_per_s": 640.0, "step_s": 0.1}
    return {"step": step, "loss": loss, **values, **more}


def entry(verdict: str, step: int, reason: str, **more: object) -> dict[str, Any]:
    plain = {"batch": [[1, 2]], "left_out": [], "loss": None, "norm": 3.0}
    return {"verdict": verdict, "step": step, "reason": reason, **plain, **more}


def measurement(step: int) -> dict[str, Any]:
    run = simulate(one_f_one_b(2, 3))
    lanes: list[list[list[Any]]] = [[], []]
    times = zip(run.schedule, run.starts.tolist(), run.ends.tolist(), strict=True)
    for (rank, action), start, stop in times:
        lanes[rank].append([action.kind.name, action.stage, action.microbatch, start, stop])
    return {
        "step": step,
        "world": 8,
        "ranks": [0, 7],
        "step_s": [0.5, 0.5],
        "compute_s": [0.25, 0.375],
        "wait_s": [0.125, 0.0],
        "slowest": {"rank": 5, "compute_s": 0.4375},
        "memory": {"weights": [2e9, 1e9], "gradients": [1e9, 1e9], "rest": [0.5e9, 0.25e9]},
        "memory_note": "as told",
        "timeline": lanes,
    }


def make_run(folder: Path, rows: list[dict[str, Any]], torn: str = "", **files: object) -> Path:
    """Write a run folder; files are named without ``.json``, lists become lines."""
    folder.mkdir(exist_ok=True)
    settings = {"steps": 9, "parallel": {"layout": "pp=2"}, "data": {"data": HOSTILE}}
    (folder / "config.json").write_text(json.dumps(settings))
    lines = "".join(json.dumps(each) + "\n" for each in rows) + torn
    (folder / "metrics.jsonl").write_text(lines)
    for name, content in files.items():
        if isinstance(content, list):
            text = "".join(json.dumps(each) + "\n" for each in content)
            (folder / f"{name}.jsonl").write_text(text)
        else:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def page_of(folder: Path) -> tuple[str, Parsed]:
    text = page(read_run(folder))
    text.encode()
    return text, Parsed(text)


def full_run(folder: Path) -> Path:
    rows = [row(step, 3.0 - step / 4, mfu=0.4, memory_bytes=2e9) for step in range(1, 9)]
    rows.insert(4, {"step": 4, "held_out_loss": 2.125, "seconds": 0.1})
    rows[2] |= {"loss": None, "verdict": "SKIP"}
    journal = [
        entry("SKIP", 3, HOSTILE, left_out=[[64, 128]]),
        entry("ROLLBACK", 5, "loss far above its course", back_to=2, loss=9.75),
    ]
    about = {
        "parameters": 12345678,
        "world": 8,
        "device": HOSTILE,
        "schedule": "1f1b",
        "pipeline_ranks": 2,
        "microbatches": 3,
    }
    summary = {"bigram_loss": 2.5, "trigram_loss": None, "sample": HOSTILE}
    measured = [measurement(3), measurement(6)]
    return make_run(folder, rows, journal=journal, about=about, summary=summary, measured=measured)


def test_a_page_shows_what_the_run_was_and_did(tmp_path: Path) -> None:
    _, found = page_of(full_run(tmp_path / "my run"))
    for told in (
        "my run",
        "step 8 of 10",
        "training loss 1 least 1 at step 8",
        "held-out loss 2.125 at step 4",
        "parameters 12.3M",
        "1 skips, 1 rollbacks",
        "loss far above its course",
        "9.75",
        "64, 128",
        "layout pp=2",
        "MFU 40.0 %",
        "At step 6 rank 5 of 8 computed longest: 0.4375 s.",
        "as told",
        "bigram",
        "measured 75 %, ideal 75 %",
    ):
        assert told in found.text, told
    assert found.count("figure") == 10
    titles = {attributes["aria-label"] for tag, attributes in found.seen if tag == "svg"}
    assert {"Loss", "Learning rate", "Memory by kind", "Pipeline"} <= titles


def test_times_of_ranks_are_those_of_the_last_layout(tmp_path: Path) -> None:
    measured = [{**measurement(step), "layout": "pp=2"} for step in (1, 2, 3)]
    measured.append({**measurement(4), "layout": "tp=2", "step_s": [9.0, 9.0]})
    _, found = page_of(make_run(tmp_path / "run", [row(1, 3.0)], measured=measured))
    assert "seconds, median of 1 measured step" in found.words


def test_a_page_needs_nothing_from_elsewhere_and_runs_nothing_of_a_runs_texts(
    tmp_path: Path,
) -> None:
    text, found = page_of(full_run(tmp_path / "run"))
    assert set(re.findall(r"https?://[^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in found.seen:
        assert not {"src", "href", "srcset", "action"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")]
    assert {tag for tag, _ in found.seen}.isdisjoint({"img", "link", "iframe", "object"})
    # The texts are there for people to read: in the journal, the settings and the sample.
    assert found.text.count("alert(2)") >= 3
    scripts = [attributes for tag, attributes in found.seen if tag == "script"]
    assert [s for s in scripts if "type" not in s] == [{}]


def test_the_points_below_the_pointer_are_those_of_the_run(tmp_path: Path) -> None:
    text, _ = page_of(full_run(tmp_path / "run"))
    blocks = re.findall(r'<script type="application/json">(.*?)</script>', text)
    curves = {curve["name"]: curve for each in blocks for curve in json.loads(each)["curves"]}
    assert curves["training"]["x"] == [1, 2, 4, 5, 6, 7, 8]
    assert curves["training"]["y"] == [2.75, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0]
    assert curves["held-out"] | {"colour": 2, "last": "2.125"} == curves["held-out"]


@pytest.mark.parametrize(
    ("rows", "torn"),
    [([], ""), ([row(1, 5.5)], ""), ([row(1, None)], ""), ([row(1, 5.5)], '{"step": 2, "lo')],
    ids=["no step", "one step", "not a number", "killed"],
)
def test_a_run_that_has_hardly_begun_has_a_page(
    tmp_path: Path, rows: list[dict[str, Any]], torn: str
) -> None:
    _, found = page_of(make_run(tmp_path / "run", rows, torn))
    assert f"step {len(rows)} of 9" in found.text
    assert ("1 unreadable lines in metrics.jsonl" in found.text) == bool(torn)
    assert "None: the guards have let every step be." in found.text


def test_nothing_in_a_folder_is_in_the_way_of_the_page(tmp_path: Path) -> None:
    folder = full_run(tmp_path / "run")
    odd: list[Any] = [
        7,
        None,
        [],
        {"step": True},
        {"step": 3, "loss": "high", "lr": [1], "tokens": 10**400},
        {"step": 4, "loss": 1e308, "grad_norm": -1e308},
        {"step": 5, "loss": 1e-320},
        {"step": 1e300, "loss": 1},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in odd))
    measured = [
        {"step": 1, "ranks": "all", "timeline": {"F": 1}},
        {"step": 2, "ranks": [0, None], "step_s": [math.nan], "memory": 5, "timeline": [[["F"]]]},
        {"step": 3, "ranks": [0], "memory": {"weights": [1]}, "timeline": [[["F", 0, 0, 1, 2]]]},
    ]
    (folder / "measured.jsonl").write_text("".join(json.dumps(each) + "\n" for each in measured))
    (folder / "journal.jsonl").write_text('{"step": 2}\n{"verdict": 1, "step": 2, "reason": []}\n')
    for name in ("config.json", "about.json", "summary.json"):
        (folder / name).write_text("[" * 3)
    _, found = page_of(folder)
    assert "5 unreadable lines in metrics.jsonl" in found.text
    with pytest.raises(RunFolderError, match="holds no run"):
        read_run(tmp_path / "elsewhere")


def test_the_command_writes_the_page_beside_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = full_run(tmp_path / "run")
    other = tmp_path / "other.html"
    assert main(["report", str(folder)]) == 0
    assert main(["report", str(folder), "--out", str(other)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n{other}\n"
    assert other.read_text() == (folder / "report.html").read_text()
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_a_step_made_again_after_a_rollback_counts_as_it_was_made_last(tmp_path: Path) -> None:
    rows = [row(1, 5.0), row(2, 9.0), row(3, 8.0), row(2, 4.0)]
    facts = read_run(make_run(tmp_path / "run", rows))
    assert facts.columns["loss"].steps.tolist() == [1, 2, 3]
    assert facts.columns["loss"].values.tolist() == [5.0, 4.0, 8.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=400), st.integers(1, 20))
def test_thinning_keeps_ends_peaks_and_dips_in_few_points(
    values: list[float], buckets: int
) -> None:
    whole = Series(np.arange(len(values), dtype=float), np.array(values))
    thinned = thin(whole, buckets)
    assert len(thinned) <= max(4 * buckets, 1)
    assert (np.diff(thinned.steps) > 0).all()
    assert (whole.values[thinned.steps.astype(int)] == thinned.values).all()
    assert {min(values), max(values)} <= set(thinned.values.tolist())
    assert {0.0, len(values) - 1.0} <= set(thinned.steps.tolist())
    means = course(whole, buckets)
    assert len(means) <= buckets
    # Summation order is all that may part them.
    assert min(values) - 1e-9 <= means.values.min() <= means.values.max() <= max(values) + 1e-9


def test_a_hundred_thousand_steps_make_a_page_of_ordinary_size() -> None:
    steps = np.arange(1.0, 100_001.0)
    values = np.sin(steps) + 2
    values[54_321] = 77.5
    drawn = draw(Chart("Loss", "", [Curve("training", Series(steps, values))], logarithmic=True))
    assert len(drawn) < 100_000
    assert "77.5" in drawn


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6), st.booleans())
def test_ticks_are_few_round_rising_numbers_on_the_axis(
    least: float, room: float, logarithmic: bool
) -> None:
    if logarithmic:
        least = abs(least) + 1e-3
    scale = scale_of([least, least + room], 0, 100, logarithmic=logarithmic)
    ticks = scale.ticks(6)
    assert 1 <= len(ticks) <= 8
    places = [scale.place(tick) for tick in ticks]
    assert all(-1e-3 <= place <= 100 + 1e-3 for place in places)
    assert places == sorted(places)
    assert len(tick_texts(ticks, logarithmic=scale.logarithmic)) == len(ticks)


def test_numbers_are_written_short_and_ticks_told_apart() -> None:
    found = [short(value) for value in (0.0, 1234.0, 12345.0, 6.5e9, 3e-5, math.inf, 9999.7)]
    assert found == ["0", "1234", "12.35k", "6.5G", "3.000e-5", "not finite", "10000"]
    assert tick_texts([0.0, 0.0001, 0.00025]) == ["0", "1e-4", "2.5e-4"]
    assert tick_texts([200_000, 205_000]) == ["200k", "205k"]
    assert tick_texts([0.3145, 0.315]) == ["0.3145", "0.3150"]
    assert tick_texts([0.1, 1, 10, 1e4], logarithmic=True) == ["0.10", "1.0", "10", "10k"]


def test_the_ideal_of_a_schedule_is_its_simulation_at_the_measured_medians() -> None:
    measured = lanes_of(measurement(1)["timeline"])
    # The backward of one microbatch was slow, and a transfer late: medians do not mind.
    late = tuple(tuple(_late(bar) for bar in lane) for lane in measured)
    about = {"schedule": "1f1b", "pipeline_ranks": 2, "microbatches": 3, "chunks": None}
    ideal = ideal_of(about, late)
    assert [[b.start_ms for b in lane] for lane in ideal] == [
        [b.start_ms for b in lane] for lane in measured
    ]
    assert busy_share(ideal) == pytest.approx(0.75)
    assert ideal_of({**about, "schedule": "unheard of"}, late) == ()
    assert ideal_of({**about, "microbatches": "many"}, late) == ()
    assert ideal_of({}, late) == ()


def _late(bar: Bar) -> Bar:
    if bar.microbatch < 2:
        return bar
    return Bar(bar.operation, bar.stage, bar.microbatch, bar.start_ms + 500, bar.stop_ms + 900)


def test_steps_without_an_update_make_a_run_longer_whoever_skipped_them(tmp_path: Path) -> None:
    rows = [row(1, 3.0, skipped=True), row(2, 3.0, verdict="SKIP"), row(3, 3.0)]

    facts = read_run(make_run(tmp_path / "run", rows))

    assert (facts.skipped, facts.steps_wanted) == (2, 9 + 2)
