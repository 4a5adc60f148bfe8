"""Stacked columns, one a rank, as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

import attrs

from trainwright.integration.report.scales import Scale, tick_texts

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 468, 14, 216
WIDEST = 44.0
"""Pixels of a column, however few there are."""


@attrs.frozen
class Layer:
    """One part of every column.

    Args:
        name: what it is.
        colour: number of its colour in the style sheet, from 1.
        values: one a column, none of them negative.
    """

    name: str
    colour: int
    values: Sequence[float]


@attrs.frozen
class Columns:
    """Columns of layers.

    Args:
        title: what they show.
        unit: of the numbers.
        names: of the columns; shown below where there is room.
        tips: what is told of each column besides its numbers.
        layers: from the bottom up.
        text: how a number is written for a person.
        note: what stands below.
    """

    title: str
    unit: str
    names: Sequence[str]
    tips: Sequence[str]
    layers: Sequence[Layer]
    note: str = ""


def draw_columns(columns: Columns) -> str:
    """Return a figure with its legend, or nothing where there is no column."""
    totals = [sum(values) for values in zip(*(la.values for la in columns.layers), strict=True)]
    if not totals or max(totals) <= 0:
        return ""
    up = Scale(0.0, max(totals) * 1.05, BOTTOM, TOP)
    title = escape(columns.title)
    legend = " ".join(
        f'<span><i class="c{la.colour}"></i>{escape(la.name)}</span>' for la in columns.layers
    )
    note = f"<p>{escape(columns.note)}</p>" if columns.note else ""
    body = "".join([*_grid(up), *_stacks(columns, up), *_names(columns.names)])
    return (
        f'<figure class="columns"><figcaption>{title} <span>{escape(columns.unit)}</span>'
        f'<small class="legend">{legend}</small></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{body}</svg>'
        f"{note}</figure>\n"
    )


def _grid(up: Scale) -> Iterator[str]:
    ticks = up.ticks(5)
    for number, text in zip(ticks, tick_texts(ticks), strict=True):
        height = up.place(number)
        yield (
            f'<line class="{"grid" if number else "axis"}" x1="{LEFT}" x2="{RIGHT}" '
            f'y1="{height:.1f}" y2="{height:.1f}"/><text class="up" x="{LEFT - 6}" '
            f'y="{height + 4:.1f}">{text}</text>'
        )


def _stacks(columns: Columns, up: Scale) -> Iterator[str]:
    pitch = (RIGHT - LEFT) / len(columns.names)
    wide = min(WIDEST, max(pitch * 0.78, 1.0))
    for place, tip in enumerate(columns.tips):
        left = LEFT + (place + 0.5) * pitch - wide / 2
        bottom = 0.0
        parts = []
        for layer in columns.layers:
            low, high = up.place(bottom), up.place(bottom + layer.values[place])
            bottom += layer.values[place]
            parts.append(
                f'<rect class="c{layer.colour}" x="{left:.1f}" y="{high:.1f}" '
                f'width="{wide:.1f}" height="{low - high:.1f}"/>'
            )
        yield f'<g data-tip="{escape(tip)}">{"".join(parts)}</g>'


def _names(names: Sequence[str]) -> Iterator[str]:
    pitch = (RIGHT - LEFT) / len(names)
    longest = max(len(name) for name in names) * 7.0 + 8
    every = max(1, -(-int(longest) // max(int(pitch), 1)))
    for place in range(0, len(names), every):
        middle = LEFT + (place + 0.5) * pitch
        name = escape(names[place])
        yield f'<text class="across" x="{middle:.1f}" y="{BOTTOM + 17}">{name}</text>'
    yield f'<text class="across name" x="{(LEFT + RIGHT) / 2:.0f}" y="{HEIGHT - 3}">rank</text>'
