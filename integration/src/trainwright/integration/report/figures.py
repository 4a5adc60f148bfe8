"""Which pictures a run has: its curves and the columns of its ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainwright.integration.outside_files import number
from trainwright.integration.report.chart import Chart, Curve, Mark
from trainwright.integration.report.columns import Columns, Layer
from trainwright.integration.report.reading import LARGEST, RunFacts, Series
from trainwright.integration.report.scales import short
from trainwright.integration.values import counted

MOST_MARKS = 150
KINDS = ("weights", "gradients", "optimizer", "snapshots", "rest")
"""What memory is used for, as `measured.jsonl` names it."""


def charts_of(facts: RunFacts) -> list[Chart]:
    """Return the charts by step; those without numbers draw nothing."""
    marks = marks_of(facts)
    columns = facts.columns
    known = [(name, number(facts.summary.get(f"{name}_loss"))) for name in ("bigram", "trigram")]
    levels = [(name, level) for name, level in known if 1 / LARGEST < level < LARGEST]
    losses = [Curve("training", columns["loss"]), Curve("held-out", facts.held_out, 2)]
    used = [Curve("MFU", _times(columns["mfu"], 100.0), 3)]
    return [
        Chart("Loss", "nats a token", losses, marks, levels, logarithmic=True),
        Chart("Gradient norm", "before clipping", [Curve("norm", columns["grad_norm"], 4)], marks,
              logarithmic=True),
        Chart("Learning rate", "", [Curve("learning rate", columns["lr"], 3)], marks),
        Chart("Throughput", "tokens a second", [Curve("tokens/s", columns["tokens_per_s"])], marks),
        Chart("Time a step", "seconds", [Curve("seconds", columns["step_s"], 2)], marks,
              logarithmic=True),
        Chart("Model FLOP utilization", "percent of the peak", used, marks),
        Chart("Memory", "GB on the first rank",
              [Curve("GB", _times(columns["memory_bytes"], 1e-9), 4)], marks),
    ]  # fmt: skip


def marks_of(facts: RunFacts) -> list[Mark]:
    """Return what to mark on the charts: every rollback and halt, and as many skips as fit."""
    found = [
        Mark(number(entry["step"]), kind, f"step {int(number(entry['step'])):,}: {verdict}\n{why}")
        for entry in facts.interventions
        if (verdict := str(entry.get("verdict", ""))) in ("SKIP", "ROLLBACK", "HALT")
        for kind, why in [(verdict.lower(), str(entry.get("reason", ""))[:300])]
    ]
    skips = [mark for mark in found if mark.kind == "skip"]
    every = math.ceil(len(skips) / MOST_MARKS) or 1
    others = [mark for mark in found if mark.kind != "skip"][-MOST_MARKS:]
    return sorted([*skips[::every], *others], key=lambda mark: mark.step)


def columns_of(facts: RunFacts) -> Iterator[Columns]:
    """Yield the columns of the ranks: where their time goes, and their memory."""
    if not facts.measurements:
        return
    last = facts.measurements[-1]
    ranks = _numbers(last.get("ranks"))
    # A run that goes on in another layout may have the same ranks.
    like = [[m.get("ranks"), m.get("layout")] for m in facts.measurements]
    same = [m for m, one in zip(facts.measurements, like, strict=True) if one == like[-1]][-10:]
    if not ranks:
        return
    names = [str(int(rank)) if math.isfinite(rank) else "?" for rank in ranks]
    yield from _times_of_ranks(same, names, last)
    yield from _memory_of_ranks(last, names)


def _times_of_ranks(
    measurements: Sequence[Mapping[str, Any]], names: list[str], last: Mapping[str, Any]
) -> Iterator[Columns]:
    whole, compute, wait = (
        _medians(measurements, name, len(names)) for name in ("step_s", "compute_s", "wait_s")
    )
    rest = [max(0.0, w - c - i) for w, c, i in zip(whole, compute, wait, strict=True)]
    tips = [
        f"rank {name}: {short(w)} s a step\ncomputes {short(c)} s, waits for the pipeline "
        f"{short(i)} s, the rest {short(r)} s"
        for name, w, c, i, r in zip(names, whole, compute, wait, rest, strict=True)
    ]
    layers = [
        Layer("computing", 1, compute),
        Layer("waiting for the pipeline", 5, wait),
        Layer("the rest: reductions, update", 2, rest),
    ]
    steps = counted(len(measurements), "measured step")
    yield Columns(
        "Time a step", f"seconds, median of {steps}", names, tips,
        layers, _slowest(last),
    )  # fmt: skip


def _slowest(last: Mapping[str, Any]) -> str:
    slowest, world = last.get("slowest"), last.get("world")
    if not isinstance(slowest, dict):
        return ""
    rank, seconds = number(slowest.get("rank")), number(slowest.get("compute_s"))
    if not (math.isfinite(rank) and math.isfinite(seconds)):
        return ""
    of = f" of {int(number(world)):,}" if math.isfinite(number(world)) else ""
    step = int(number(last["step"]))
    return f"At step {step:,} rank {int(rank):,}{of} computed longest: {short(seconds)} s."


def _memory_of_ranks(last: Mapping[str, Any], names: list[str]) -> Iterator[Columns]:
    memory = last.get("memory")
    if not isinstance(memory, dict):
        return
    parts = {kind: _fitting(memory.get(kind), len(names)) for kind in KINDS}
    layers = [
        Layer(_WORDS[kind], colour, [value / 1e9 for value in values])
        for colour, (kind, values) in enumerate(parts.items(), start=1)
        if any(values)
    ]
    tips = [
        f"rank {name}\n" + "\n".join(f"{la.name} {short(la.values[place])} GB" for la in layers)
        for place, name in enumerate(names)
    ]
    note = str(last.get("memory_note", ""))[:300]
    yield Columns("Memory by kind", "GB", names, tips, layers, note)


_WORDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "snapshots": "snapshots",
    "rest": "activations and the rest",
}


def _medians(measurements: Sequence[Mapping[str, Any]], name: str, size: int) -> list[float]:
    found = [_fitting(measurement.get(name), size) for measurement in measurements]
    return [statistics.median(values) for values in zip(*found, strict=True)]


def _fitting(values: object, size: int) -> list[float]:
    """Return so many numbers that are not negative, whatever is there."""
    numbers = [max(0.0, value) if math.isfinite(value) else 0.0 for value in _numbers(values)]
    return (numbers + [0.0] * size)[:size]


def _numbers(values: object) -> list[float]:
    return [number(value) for value in values] if isinstance(values, list) else []


def _times(series: Series, factor: float) -> Series:
    return Series(series.steps, series.values * factor)
