"""The pipeline as it was measured, above what its schedule would be without any waiting."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import attrs

from trainwright.integration.outside_files import number
from trainwright.integration.report.scales import Scale, short
from trainwright.pipeline_schedules import GENERATORS, Costs, Kind, ScheduleError, simulate

COMPUTATIONS = ("F", "B", "I", "W")
WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
LEFT, TOP, LANE, BAR, GAP = 62, 6, 26, 20, 34
WIDTH, WIDEST = 1240, 2600
MOST_BARS = 6000
"""Of a larger pipeline evenly chosen ranks are drawn."""


@attrs.frozen
class Bar:
    """One operation of one rank.

    Args:
        operation: "F", "B", "I", "W", or "wait for …".
        stage: of the pipeline.
        microbatch: its number; -1 for none.
        start_ms, stop_ms: from the first start of any rank.
    """

    operation: str
    stage: int
    microbatch: int
    start_ms: float
    stop_ms: float


_LONGEST_S = 1e12
_CLOCK = "Times are the host's on a CPU, those of the stream on an accelerator."

Lanes = tuple[tuple[Bar, ...], ...]
"""For each rank of the pipeline what took its time."""


def lanes_of(timeline: object) -> Lanes:
    """Return what a measurement holds of a pipeline; empty where it holds nothing sensible."""
    if not isinstance(timeline, list):
        return ()
    found = tuple(tuple(_bars(line)) for line in timeline)
    starts = [bar.start_ms for lane in found for bar in lane]
    if not starts:
        return ()
    begin = min(starts)
    return tuple(tuple(_moved(bar, begin) for bar in lane) for lane in found)


def ideal_of(about: Mapping[str, Any], lanes: Lanes) -> Lanes:
    """Return the schedule at the medians of what was measured, transfers taking no time.

    Empty where the schedule is not known.
    """
    name, ranks = str(about.get("schedule")), about.get("pipeline_ranks")
    microbatches: Any = about.get("microbatches")
    chunks = about.get("chunks")
    bars = sum(len(lane) for lane in lanes)
    sizes = (microbatches, 1 if chunks is None else chunks)
    # Each microbatch has left a bar on each stage: more would be a schedule without end.
    if name not in GENERATORS or ranks != len(lanes):
        return ()
    if not all(type(size) is int and 0 < size <= bars for size in sizes):
        return ()
    try:
        schedule = GENERATORS[name].make(ranks, microbatches, chunks)
        run = simulate(schedule, _measured_costs(lanes, schedule.num_stages))
    except (TypeError, ValueError, ScheduleError):
        return ()
    ideal: list[list[Bar]] = [[] for _ in lanes]
    times = zip(run.starts.tolist(), run.ends.tolist(), strict=True)
    for (rank, action), (start, stop) in zip(run.schedule, times, strict=True):
        kind = "F" if action.kind is Kind.F_PAIRED else action.kind.name
        ideal[rank].append(Bar(kind, action.stage, action.microbatch, start, stop))
    return tuple(tuple(lane) for lane in ideal)


def busy_share(lanes: Lanes) -> float:
    """Return which share of the ranks' time, from first start to last end, they computed."""
    work = sum(b.stop_ms - b.start_ms for lane in lanes for b in lane if b.operation in WORDS)
    return work / (_span(lanes) * len(lanes) or 1.0)


def draw_pipeline(measured: Lanes, ideal: Lanes, step: int) -> str:
    """Return a figure of both, on one axis of time."""
    if not measured:
        return ""
    kept = _kept_ranks(measured)
    groups = [("measured", measured)] + ([("ideal", ideal)] if ideal else [])
    span = max(_span(lanes) for _, lanes in groups) or 1.0
    axis = _axis(span, [lanes for _, lanes in groups])
    body: list[str] = []
    top = TOP
    for name, lanes in groups:
        body.append(f'<text class="group" x="2" y="{top + 12}">{name}</text>')
        for row, rank in enumerate(kept):
            body += _lane(rank, lanes[rank], top + 18 + row * LANE, axis)
        top += 18 + len(kept) * LANE + 8
    body += _ticks(axis, top)
    height, width = top + GAP - 8, axis.stop + 12
    told = [f"{name} {100 * busy_share(lanes):.0f} %" for name, lanes in groups]
    return (
        f'<figure class="pipeline"><figcaption>Pipeline <span>step {step}, in ms</span>'
        f'<small class="legend">{_legend(measured)}</small></figcaption><div class="scroll">'
        f'<svg viewBox="0 0 {width:.0f} {height}" style="min-width:{width * 0.8:.0f}px" '
        f'role="img" aria-label="Pipeline">{"".join(body)}</svg></div>'
        f"<p>Share of the time in which ranks compute: {', '.join(told)}. {_note(ideal)}</p>"
        "</figure>\n"
    )


def _note(ideal: Lanes) -> str:
    if not ideal:
        return _CLOCK
    return (
        "Ideal is the schedule at the medians of the measured operations, with transfers that "
        f"take no time. {_CLOCK}"
    )


def _bars(line: object) -> Iterator[Bar]:
    for entry in line if isinstance(line, list) else ():
        if not isinstance(entry, list) or len(entry) != 5 or not isinstance(entry[0], str):
            continue
        start, stop = number(entry[3]), number(entry[4])
        is_shown = entry[0] in WORDS or entry[0].startswith("wait")
        is_time = -_LONGEST_S < start <= stop < _LONGEST_S
        if is_shown and is_time and all(type(n) is int for n in entry[1:3]):
            yield Bar(entry[0], entry[1], entry[2], start * 1e3, stop * 1e3)


def _moved(bar: Bar, begin: float) -> Bar:
    return attrs.evolve(bar, start_ms=bar.start_ms - begin, stop_ms=bar.stop_ms - begin)


def _measured_costs(lanes: Lanes, stages: int) -> Costs:
    durations: dict[tuple[str, int], list[float]] = {}
    for lane in lanes:
        for bar in lane:
            durations.setdefault((bar.operation, bar.stage), []).append(bar.stop_ms - bar.start_ms)

    def medians(kind: str) -> tuple[float, ...]:
        return tuple(statistics.median(durations.get((kind, s), [0.0])) for s in range(stages))

    return Costs(medians("F"), medians("I"), medians("W"), backward=medians("B"))


def _span(lanes: Lanes) -> float:
    return max((bar.stop_ms for lane in lanes for bar in lane), default=0.0)


def _kept_ranks(lanes: Lanes) -> list[int]:
    bars = sum(len(lane) for lane in lanes)
    most = max(2, min(len(lanes), MOST_BARS * len(lanes) // max(bars, 1)))
    if most >= len(lanes):
        return list(range(len(lanes)))
    return sorted({round(place * (len(lanes) - 1) / (most - 1)) for place in range(most)})


def _axis(span: float, groups: Sequence[Lanes]) -> Scale:
    """Return an axis on which most microbatch numbers find room on their bars."""
    lengths = [b.stop_ms - b.start_ms for g in groups for lane in g for b in lane]
    usual = statistics.median(lengths or [span]) or span
    width = min(max(WIDTH, 20.0 * span / usual), WIDEST)
    return Scale(0.0, span, LEFT, width - 12)


def _lane(rank: int, lane: Sequence[Bar], top: float, axis: Scale) -> Iterator[str]:
    yield f'<text class="up" x="{LEFT - 8}" y="{top + 14}">rank {rank}</text>'
    yield (
        f'<rect class="idle" x="{LEFT}" y="{top}" width="{axis.stop - LEFT:.1f}" height="{BAR}"/>'
    )
    chunks = {stage: place for place, stage in enumerate(sorted({bar.stage for bar in lane}))}
    for bar in lane:
        left = axis.place(bar.start_ms)
        wide = axis.place(bar.stop_ms) - left
        kind = bar.operation if bar.operation in WORDS else "wait"
        if kind == "wait" and wide < 0.3:
            continue
        text = bar.operation if kind == "wait" else WORDS[kind]
        tip = (
            f"{text}, stage {bar.stage}, microbatch {bar.microbatch}: "
            f"{short(bar.start_ms)} to {short(bar.stop_ms)} ms"
        )
        second = " second" if chunks[bar.stage] % 2 else ""
        yield (
            f'<rect class="k{kind}{second}" x="{left:.2f}" y="{top}" width="{wide:.2f}" '
            f'height="{BAR}" data-tip="{escape(tip)}"/>'
        )
        if kind != "wait" and wide > 7 * len(str(bar.microbatch)) + 2:
            middle = left + wide / 2
            yield f'<text class="in" x="{middle:.1f}" y="{top + 14}">{bar.microbatch}</text>'


def _ticks(axis: Scale, top: float) -> Iterator[str]:
    ticks = axis.ticks(max(4, int((axis.stop - axis.start) / 110)))
    for place, text in zip(map(axis.place, ticks), (f"{t:,.5g}" for t in ticks), strict=True):
        yield f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{top - 6}" y2="{top}"/>'
        yield f'<text class="across" x="{place:.1f}" y="{top + 13}">{text}</text>'


def _legend(lanes: Lanes) -> str:
    shown = {bar.operation for lane in lanes for bar in lane}
    items = [
        f'<span><i class="k{kind}"></i>{WORDS[kind]}</span>'
        for kind in COMPUTATIONS
        if kind in shown
    ]
    if any(operation.startswith("wait") for operation in shown):
        items.append('<span><i class="kwait"></i>waiting</span>')
    return " ".join(items)
