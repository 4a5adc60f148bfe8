"""Curves by step as inline SVG, drawn twice: on a linear and on a logarithmic axis."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from html import escape

import attrs
import numpy as np

from trainwright.integration.report.reading import Series
from trainwright.integration.report.scales import Scale, scale_of, short, tick_texts
from trainwright.integration.report.thinning import course, thin

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 468, 14, 216
DOTS_UP_TO = 40
"""Curves of so few points show each of them."""


@attrs.frozen(eq=False)
class Curve:
    """One line of a chart.

    Args:
        name: what it is.
        series: numbers by step.
        colour: number of its colour in the style sheet, from 1.
        course: its means over ranges of steps, where it has more points than are drawn.
    """

    name: str
    series: Series
    colour: int = 1
    course: Series | None = None


@attrs.frozen
class Mark:
    """Something that happened at a step.

    Args:
        step: when.
        kind: "skip", "rollback" or "halt".
        text: what is told of it.
    """

    step: float
    kind: str
    text: str


@attrs.frozen(eq=False)
class Chart:
    """Curves that share their axes.

    Args:
        title: what it shows.
        unit: of its numbers.
        curves: at least one of them with a finite number.
        marks: what happened at some steps.
        levels: names and heights of horizontal lines.
        logarithmic: whether there is a logarithmic axis too, which a switch of the page shows.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    levels: Sequence[tuple[str, float]] = ()
    logarithmic: bool = False


def draw(chart: Chart) -> str:
    """Return a figure with its legend, or nothing where no curve has a finite number."""
    curves = [_drawable(curve) for curve in chart.curves if len(curve.series.finite)]
    if not curves:
        return ""
    steps = [float(step) for curve in curves for step in curve.series.steps]
    across = _steps_axis(min(steps), max(steps))
    pictures = [_picture(chart, curves, across, logarithmic=False)]
    if _has_logarithm(chart, curves):
        pictures.append(_picture(chart, curves, across, logarithmic=True))
    parts, axes = zip(*pictures, strict=True)
    classes = "chart both" if len(parts) == 2 else "chart"
    title = escape(chart.title)
    return (
        f'<figure class="{classes}"><figcaption>{title} <span>{escape(chart.unit)}</span>'
        f"{_legend(curves)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}'
        f'<g class="cursor"></g></svg>{_points(curves, across, axes)}</figure>\n'
    )


def _drawable(curve: Curve) -> Curve:
    whole = curve.series.finite
    thinned = thin(whole)
    return attrs.evolve(
        curve, series=thinned, course=course(whole) if len(thinned) < len(whole) else None
    )


def _steps_axis(first: float, last: float) -> Scale:
    if first == last:
        return Scale(first - 1, last + 1, LEFT, RIGHT)
    room = 0.015 * (last - first)
    return Scale(first - room, last + room, LEFT, RIGHT)


def _has_logarithm(chart: Chart, curves: Sequence[Curve]) -> bool:
    return chart.logarithmic and all((curve.series.values > 0).all() for curve in curves)


def _picture(
    chart: Chart, curves: Sequence[Curve], across: Scale, *, logarithmic: bool
) -> tuple[str, Scale]:
    """Return one of the two pictures of a chart, and its upward axis."""
    values = [float(value) for curve in curves for value in curve.series.values]
    levels = [(n, v) for n, v in chart.levels if np.isfinite(v) and (v > 0 or not logarithmic)]
    values += [value for _, value in levels]
    up = scale_of(values, BOTTOM, TOP, logarithmic=logarithmic)
    body = [
        *_grid(across, up),
        *(_mark(mark, across) for mark in chart.marks if across.least <= mark.step),
        *(part for curve in curves for part in _curve(curve, across, up)),
        *_levels([(name, up.place(value)) for name, value in levels]),
    ]
    name = "logarithmic" if logarithmic else "linear"
    return f'<g class="{name}">{"".join(body)}</g>', up


def _grid(across: Scale, up: Scale) -> Iterator[str]:
    ticks = up.ticks(7)
    texts = tick_texts(ticks, logarithmic=up.logarithmic)
    for height, text in zip(map(up.place, ticks), texts, strict=True):
        yield (
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="up" x="{LEFT - 6}" y="{height + 4:.1f}">{text}</text>'
        )
    yield f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    places = [tick for tick in across.ticks(6) if tick >= 0 and tick == round(tick)]
    for place, text in zip(map(across.place, places), tick_texts(places), strict=True):
        yield (
            f'<line class="axis" x1="{place:.1f}" x2="{place:.1f}" y1="{BOTTOM}" '
            f'y2="{BOTTOM + 4}"/><text class="across" x="{place:.1f}" y="{BOTTOM + 17}">'
            f"{text}</text>"
        )
    yield f'<text class="across name" x="{(LEFT + RIGHT) / 2:.0f}" y="{HEIGHT - 3}">step</text>'


def _levels(levels: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Draw the higher ones' names above their lines, and one that is close below below its own."""
    above = -math.inf
    for name, height in sorted(levels, key=lambda level: level[1]):
        baseline = height + 13 if height - above < 14 else height - 4
        above = height
        yield (
            f'<line class="level" x1="{LEFT}" x2="{RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="level" x="{RIGHT - 2}" y="{baseline:.1f}">{escape(name)}</text>'
        )


def _mark(mark: Mark, across: Scale) -> str:
    place = across.place(min(mark.step, across.greatest))
    top = TOP - 8
    return (
        f'<g class="mark {mark.kind}" data-tip="{escape(mark.text)}">'
        f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{top}" y2="{BOTTOM}"/>'
        f'<path d="M{place - 4:.1f} {top - 5}h8l-4 7z"/></g>'
    )


def _curve(curve: Curve, across: Scale, up: Scale) -> Iterator[str]:
    places = _places(curve.series, across, up)
    faint = " faint" if curve.course is not None else ""
    if len(places) > 1:
        yield f'<path class="curve c{curve.colour}{faint}" d="M{"L".join(places)}"/>'
    if curve.course is not None:
        path = "L".join(_places(curve.course, across, up))
        yield f'<path class="curve c{curve.colour}" d="M{path}"/>'
    if len(places) <= DOTS_UP_TO:
        for place in places:
            left, height = place.split()
            yield f'<circle class="dot c{curve.colour}" cx="{left}" cy="{height}" r="2.6"/>'


def _places(series: Series, across: Scale, up: Scale) -> list[str]:
    pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
    return [f"{across.place(step):.1f} {up.place(value):.1f}" for step, value in pairs]


def _legend(curves: Sequence[Curve]) -> str:
    items = [
        f'<span><i class="c{c.colour}"></i>{escape(c.name)}</span>'
        for c in curves
        if len(curves) > 1
    ]
    return f'<small class="legend">{" ".join(items)}</small>' if items else ""


def _points(curves: Sequence[Curve], across: Scale, axes: Sequence[Scale]) -> str:
    """Return what the script of the page needs to show the values below the pointer."""
    content = {
        "x": [across.least, across.greatest, LEFT, RIGHT],
        "y": [[up.least, up.greatest, BOTTOM, TOP] for up in axes],
        "curves": [
            {
                "name": curve.name,
                "colour": curve.colour,
                "x": [int(step) if step == int(step) else step for step in curve.series.steps],
                "y": [float(f"{value:.5g}") for value in curve.series.values],
                "last": short(float(curve.series.values[-1])),
            }
            for curve in curves
        ],
    }
    return as_script(content)


def as_script(content: object) -> str:
    """Return data for the page's script, in which no text can end the element."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json">{text}</script>'
