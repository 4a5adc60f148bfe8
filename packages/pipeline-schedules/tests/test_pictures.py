"""Pictures and traces show every operation where it ran, of simulated and of measured runs."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from trainwright.pipeline_schedules import (
    Costs,
    Schedule,
    ScheduleError,
    WeightPlan,
    dualpipe_v,
    lower,
    one_f_one_b,
    simulate,
    svg,
    trace,
    zb_v,
)
from trainwright.pipeline_schedules.bars import bars_of
from trainwright.pipeline_schedules.svg import COLOURS, TEXT
from trainwright.pipeline_schedules.testing import valid_schedules

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = [
    [
        SimpleNamespace(operation="F", stage=0, microbatch=0, start_s=0.5, stop_s=1.5),
        SimpleNamespace(operation="SEND_F", stage=0, microbatch=0, start_s=1.5, stop_s=1.75),
        SimpleNamespace(operation="B", stage=0, microbatch=0, start_s=4.5, stop_s=5.5),
    ],
    [
        SimpleNamespace(operation="wait for input", stage=1, microbatch=0, start_s=0.5, stop_s=2.0),
        SimpleNamespace(operation="F", stage=1, microbatch=0, start_s=2.0, stop_s=3.0),
        SimpleNamespace(operation="B", stage=1, microbatch=0, start_s=3.0, stop_s=4.5),
        SimpleNamespace(operation="REDUCE", stage=1, microbatch=-1, start_s=4.5, stop_s=5.0),
    ],
]


def tooltips(picture: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@given(schedule=valid_schedules())
@settings(max_examples=10)
def test_pictures_and_traces_hold_every_action_once_at_its_time(schedule: Schedule) -> None:
    run = simulate(schedule, Costs(1, 1.5, 0.5, latency=0.25))
    expected = [
        f"{action}: {start:g} to {end:g}"
        for (_, action), start, end in zip(schedule, run.starts, run.ends, strict=True)
    ]
    assert tooltips(svg(run)) == expected
    events = [e for e in json.loads(trace(run, unit_us=4))["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"]) for e in events] == [(str(a), rank) for rank, a in schedule]
    assert [e["ts"] for e in events] == [4 * start for start in run.starts]
    assert [e["dur"] for e in events] == pytest.approx(list(4 * (run.ends - run.starts)))


def test_eight_ranks_and_32_microbatches_have_a_number_on_every_bar() -> None:
    root = ElementTree.fromstring(svg(one_f_one_b(8, 32)))
    numbers = [t.text for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "middle"]
    assert sum(number is not None and number.isdigit() for number in numbers) >= 8 * 64
    labels = [text.text for text in root.iter(f"{SVG}text")]
    assert [f"rank {rank}" for rank in range(8)] == [t for t in labels if (t or "")[:5] == "rank "]
    assert float(root.get("width") or 0) < 2500


def test_bars_lie_where_they_ran_and_as_long() -> None:
    run = simulate(one_f_one_b(2, 2), Costs(1, 0.5, 0.25))
    root = ElementTree.fromstring(svg(run, width=100 * run.makespan))
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    left = [float(bar.get("x") or 0) for bar in bars]
    assert left == pytest.approx([left[0] + 100 * start for start in run.starts], abs=0.02)
    wide = [float(bar.get("width") or 0) for bar in bars]
    assert wide == pytest.approx(list(100 * (run.ends - run.starts)), abs=0.02)
    heights = [bar.get("y") for bar in bars]
    assert [heights[0], heights[-1]] == [*dict.fromkeys(heights)]


def test_text_stands_out_from_every_colour() -> None:
    for fill in (shade for pair in COLOURS.values() for shade in pair):
        assert (luminance(fill) + 0.05) / (luminance(TEXT) + 0.05) >= 7
    assert len({shade for pair in COLOURS.values() for shade in pair}) == 8


def test_chunks_of_a_rank_differ_in_shade_and_pairs_are_two_bars() -> None:
    picture = svg(zb_v(2, 3))
    assert all(shade in picture for kind in "FIW" for shade in COLOURS[kind])
    schedule = dualpipe_v(2, 6)
    assert len(tooltips(svg(schedule))) == schedule.num_actions
    assert not any("PAIRED" in tooltip for tooltip in tooltips(svg(schedule)))


def test_gathers_and_reductions_stand_beside_the_computation() -> None:
    run = simulate(lower(one_f_one_b(2, 2), WeightPlan(keep=0)), Costs(gather=0.5, reduce=0.5))
    beside = [bar for bar in bars_of(run) if not bar.computes]
    assert {bar.operation for bar in beside} == {"GATHER", "REDUCE"}
    assert svg(run).count("beside the computation") == 1
    lanes = {(e["tid"], e["cat"]) for e in json.loads(trace(run))["traceEvents"] if e["ph"] == "X"}
    assert lanes == {(0, "F"), (0, "B"), (1, "GATHER"), (1, "REDUCE")}


def test_measured_timelines_are_drawn_like_simulations() -> None:
    picture = svg(MEASURED)
    assert "measured run" in picture
    assert tooltips(picture)[0] == "0F0: 0 to 1"
    assert tooltips(picture)[3] == "1wait for input0: 0 to 1.5"
    events = json.loads(trace(MEASURED))["traceEvents"]
    backward = next(event for event in events if event["name"] == "1B0")
    assert (backward["ts"], backward["dur"], backward["pid"]) == (2.5e6, 1.5e6, 1)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 0", "rank 1",
    ]  # fmt: skip


def test_titles_are_escaped_and_a_width_is_kept() -> None:
    picture = svg(one_f_one_b(2, 2), title="F < B & W", width=500)
    assert ElementTree.fromstring(picture).get("width") == "590"
    assert "F &lt; B &amp; W" in picture


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda: svg([]), "holds no operations"),
        (lambda: trace([[], []]), "holds no operations"),
        (lambda: svg(one_f_one_b(1, 1), width=0), "width must be positive"),
        (lambda: trace(one_f_one_b(1, 1), unit_us=math.inf), "unit_us must be positive"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: object, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        draw()  # type: ignore[operator]
