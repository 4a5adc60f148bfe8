"""The whole page: one HTML file that needs nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from trainwright.integration.outside_files import number
from trainwright.integration.report.chart import draw
from trainwright.integration.report.columns import draw_columns
from trainwright.integration.report.figures import charts_of, columns_of, marks_of
from trainwright.integration.report.pipeline import draw_pipeline, ideal_of, lanes_of
from trainwright.integration.report.reading import RunFacts
from trainwright.integration.report.scales import short
from trainwright.integration.report.tiles import tiles_of

MOST_INTERVENTIONS = 500
"""Rows of the table; of more, the first and the last half are shown."""

_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""What may be in a journal and in no page."""


def page(facts: RunFacts) -> str:
    """Return the page of a run as text: HTML with its style, pictures and script inside."""
    here = Path(__file__)
    name = escape(facts.path.resolve().name)
    text = "".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{name} – trainwright</title>\n",
            f"<style>\n{here.with_suffix('.css').read_text()}</style>\n</head>\n<body>\n",
            f'<header><h1>{name}</h1><p class="lead">{escape(_lead(facts))}</p></header>\n',
            *_tiles(facts),
            *_curves(facts),
            *_interventions(facts),
            *_ranks(facts),
            *_settings(facts),
            *_sample(facts),
            f'<div id="tip"></div>\n<script>\n{here.with_suffix(".js").read_text()}</script>\n',
            "</body>\n</html>\n",
        ]
    )
    return _NO_TEXT.sub("\ufffd", text)


def _lead(facts: RunFacts) -> str:
    made, wanted = facts.steps_made, facts.steps_wanted
    told = [f"step {made:,} of {wanted:,}" if wanted else f"step {made:,}"]
    if facts.written is not None:
        told.append("last written " + time.strftime("%Y-%m-%d %H:%M:%S", _local(facts.written)))
    told += [f"{count} unreadable lines in {name}" for name, count in facts.unreadable.items()]
    told.append(str(facts.path))
    return " · ".join(told)


def _local(seconds: float) -> time.struct_time:
    return time.localtime(seconds)


def _tiles(facts: RunFacts) -> Iterator[str]:
    yield '<div class="tiles">'
    for tile in tiles_of(facts):
        note = f"<small>{escape(tile.note)}</small>" if tile.note else ""
        yield f"<div><small>{escape(tile.name)}</small><b>{escape(tile.value)}</b>{note}</div>"
    yield "</div>\n"


def _curves(facts: RunFacts) -> Iterator[str]:
    figures = [drawn for drawn in map(draw, charts_of(facts)) if drawn]
    switch = '<label><input type="checkbox" id="log"> logarithmic</label>' if figures else ""
    kinds = {mark.kind for mark in marks_of(facts)}
    shown = [
        f'<span><i class="mark {k}"></i>{k}</span>'
        for k in ("skip", "rollback", "halt")
        if k in kinds
    ]
    legend = f'<small class="legend">{" ".join(shown)}</small>' if shown and figures else ""
    yield f"<h2>Curves {switch}{legend}</h2>\n"
    if not figures:
        yield '<p class="none">No step has been made yet.</p>\n'
    yield f'<div class="figures">\n{"".join(figures)}</div>\n'


def _interventions(facts: RunFacts) -> Iterator[str]:
    yield "<h2>Interventions</h2>\n"
    entries = list(facts.interventions)
    if not entries:
        yield '<p class="none">None: the guards have let every step be.</p>\n'
        return
    if len(entries) > MOST_INTERVENTIONS:
        yield f'<p class="none">{MOST_INTERVENTIONS} of {len(entries)} are shown.</p>\n'
        half = MOST_INTERVENTIONS // 2
        entries = [*entries[:half], *entries[-half:]]
    heads = ("step", "verdict", "reason", "loss", "norm", "back to", "left out")
    yield '<div class="table"><table><thead><tr>'
    yield "".join(
        f"<th>{head}</th>" if head in ("verdict", "reason") else f'<th class="n">{head}</th>'
        for head in heads
    )
    yield "</tr></thead><tbody>\n"
    for entry in entries:
        verdict = str(entry.get("verdict", ""))
        kind = verdict.lower() if verdict in ("SKIP", "ROLLBACK", "HALT") else ""
        yield (
            f'<tr><td class="n">{int(number(entry["step"])):,}</td>'
            f'<td class="verdict {kind}">{escape(verdict)}</td>'
            f'<td class="why">{escape(str(entry.get("reason", "")))}</td>'
            f'<td class="n">{_number(entry.get("loss"))}</td>'
            f'<td class="n">{_number(entry.get("norm"))}</td>'
            f'<td class="n">{_plain(entry.get("back_to"))}</td>'
            f'<td class="n">{_plain(entry.get("left_out"))}</td></tr>\n'
        )
    yield "</tbody></table></div>\n"


def _number(value: object) -> str:
    return short(number(value)) if value is not None else "–"


def _plain(value: object) -> str:
    """Return a cell of whole numbers or spans of them."""
    if isinstance(value, list):
        return escape(", ".join(_plain(each) for each in value) or "–")[:200]
    return "–" if value is None else escape(str(value)[:60])


def _ranks(facts: RunFacts) -> Iterator[str]:
    figures = [draw_columns(columns) for columns in columns_of(facts)]
    measured = [m for m in facts.measurements if lanes_of(m.get("timeline"))]
    pipeline = ""
    if measured:
        lanes = lanes_of(measured[-1]["timeline"])
        # A batch that grows has more microbatches at some steps than at others.
        made = {key: measured[-1][key] for key in ("microbatches",) if key in measured[-1]}
        ideal = ideal_of({**facts.about, **made}, lanes)
        pipeline = draw_pipeline(lanes, ideal, int(number(measured[-1]["step"])))
    if not any(figures) and not pipeline:
        return
    yield "<h2>Ranks</h2>\n"
    yield f'<div class="figures">\n{"".join(figures)}</div>\n'
    if pipeline:
        yield f'<div style="margin-top:0.9rem">{pipeline}</div>\n'


def _settings(facts: RunFacts) -> Iterator[str]:
    sections = {**facts.settings, "of the run": facts.about}
    yield '<h2>Settings</h2>\n<div class="settings">\n'
    for name, values in sections.items():
        if not values:
            continue
        heading = f"<h3>{escape(name.replace('_', ' '))}</h3>" if name else ""
        rows = "".join(
            f"<dt>{escape(str(key))}</dt><dd>{escape(_setting(value))}</dd>"
            for key, value in values.items()
        )
        yield f"<section>{heading}<dl>{rows}</dl></section>\n"
    yield "</div>\n"


def _setting(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 1e6 else short(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 1e15 else str(value)[:40]
    return str(value)[:400]


def _sample(facts: RunFacts) -> Iterator[str]:
    sample = facts.summary.get("sample")
    if isinstance(sample, str) and sample:
        yield f"<h2>Sample</h2>\n<pre>{escape(sample[:4000])}</pre>\n"
