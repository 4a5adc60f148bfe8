"""Runs as pictures: time from left to right, a lane a rank, a colour a kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from trainwright.pipeline_schedules.bars import COMPUTATIONS, Bar, Run, bars_of, headline
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.simulate import Simulation, simulate

TEXT = "#111111"
"""Of all text, on white and on every colour."""

COLOURS = {
    "F": ("#a9cdf5", "#7fb2ec"),
    "I": ("#a8dfb4", "#7ccb8d"),
    "W": ("#f9dc8f", "#f2c54f"),
    "B": ("#f5bcb0", "#ec9583"),
}
"""Fill of each kind, of the first chunk of a rank and of every other one."""

_WORDS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}
_BESIDE = "#b8b8b8"
_LANE, _BAR, _GAP = 28, 22, 4
_LEFT, _TOP, _BOTTOM = 70, 56, 34
_SHORTEST_PX, _DIGIT_PX = 18.0, 6.2
_WIDEST_PX = 20_000.0


def svg(run: Run, *, title: str | None = None, width: float | None = None) -> str:
    """Draw a run as SVG, with microbatch numbers on the bars, and all of each bar as a tooltip.

    Of a rank with several stages, the first one's bars are lighter. What does not take the rank's
    time (gathers, reductions, and in measured runs transfers and waits) is a grey strip below.

    Args:
        run: A simulation, a schedule (simulated at F = I = W = 1, B = 2), or for each rank the
            timeline of a measured step.
        title: What stands above; None for the schedule's name and its bubble.
        width: Of the time axis in pixels; None for as wide as two digits need on the shortest
            action, at most 20,000.

    Raises:
        ScheduleError: Nothing to draw, a width that is not positive, or times too small to draw.
    """
    if width is not None and not 0 < width < math.inf:
        raise ScheduleError(f"width must be positive, got {width}")
    simulation = simulate(run) if isinstance(run, Schedule) else run
    bars = bars_of(simulation)
    span = max(bar.stop for bar in bars) or 1.0
    shortest = min(
        (b.stop - b.start for b in bars if b.computes and b.stop > b.start), default=span
    )
    axis = min(span * _SHORTEST_PX / shortest, _WIDEST_PX) if width is None else width
    scale = axis / span
    if not (0 < scale < math.inf and 90 / scale > 0):
        raise ScheduleError(
            f"a run of {span:g} cannot be drawn on {axis:g} pixels; take costs that are nearer to 1"
        )
    ranks = 1 + max(bar.rank for bar in bars)
    if title is None:
        title = "measured run, in seconds"
        if isinstance(simulation, Simulation):
            title = headline(simulation)
    total, height = _LEFT + axis + 20, _TOP + ranks * _LANE + _BOTTOM
    body = [
        _opening(max(total, 560.0), height),
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
        *_legend(bars),
        *_lanes(ranks, axis),
        *(_bar(bar, scale, chunk) for bar, chunk in zip(bars, _chunks(bars), strict=True)),
        *_ticks(span, scale, _TOP + ranks * _LANE),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _opening(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" fill="{TEXT}">'
        f'<rect width="100%" height="100%" fill="white"/>'
    )


def _legend(bars: list[Bar]) -> Iterator[str]:
    shown = {bar.operation for bar in bars}
    left = 8.0
    for operation in (name for name in COMPUTATIONS if name in shown):
        words = f"{operation} {_WORDS[operation]}"
        yield f'<rect x="{left:.0f}" y="28" width="12" height="12" fill="{COLOURS[operation][0]}"/>'
        yield f'<text x="{left + 16:.0f}" y="38" font-size="11">{words}</text>'
        left += 34 + _DIGIT_PX * len(words)
    if shown - set(COMPUTATIONS):
        yield f'<rect x="{left:.0f}" y="34" width="12" height="4" fill="{_BESIDE}"/>'
        yield f'<text x="{left + 16:.0f}" y="38" font-size="11">beside the computation</text>'


def _lanes(ranks: int, axis: float) -> Iterator[str]:
    for rank in range(ranks):
        top = _TOP + rank * _LANE
        yield f'<text x="8" y="{top + 15}" font-size="12">rank {rank}</text>'
        yield f'<rect x="{_LEFT}" y="{top}" width="{axis:.1f}" height="{_BAR}" fill="#f2f2f2"/>'


def _chunks(bars: list[Bar]) -> list[int]:
    """For each bar the place of its stage among those of its rank."""
    stages: dict[int, set[int]] = {}
    for bar in bars:
        stages.setdefault(bar.rank, set()).add(bar.stage)
    places = {
        (rank, stage): place
        for rank, own in stages.items()
        for place, stage in enumerate(sorted(own))
    }
    return [places[bar.rank, bar.stage] for bar in bars]


def _bar(bar: Bar, scale: float, chunk: int) -> str:
    left, wide = _LEFT + bar.start * scale, (bar.stop - bar.start) * scale
    top = _TOP + bar.rank * _LANE
    tooltip = f"<title>{escape(bar.label)}: {bar.start:g} to {bar.stop:g}</title>"
    if not bar.computes:
        return (
            f'<rect x="{left:.2f}" y="{top + _BAR}" width="{wide:.2f}" height="{_GAP}" '
            f'fill="{_BESIDE}">{tooltip}</rect>'
        )
    fill = COLOURS[bar.operation][min(chunk, 1)]
    drawn = (
        f'<rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_BAR}" fill="{fill}" '
        f'stroke="white" stroke-width="0.8">{tooltip}</rect>'
    )
    number = str(bar.microbatch)
    if wide < _DIGIT_PX * len(number) + 2:
        return drawn
    middle = left + wide / 2
    return (
        f'{drawn}<text x="{middle:.2f}" y="{top + 15}" font-size="10" text-anchor="middle" '
        f'pointer-events="none">{number}</text>'
    )


def _ticks(span: float, scale: float, top: float) -> Iterator[str]:
    """About one mark in 90 pixels, at round times."""
    step = _round_up(90 / scale)
    for number in range(math.floor(span / step + 1e-9) + 1):
        left = _LEFT + number * step * scale
        yield (
            f'<line x1="{left:.1f}" y1="{_TOP - 4}" x2="{left:.1f}" y2="{top:.0f}" '
            f'stroke="#999999" stroke-width="0.5"/>'
        )
        yield (
            f'<text x="{left:.1f}" y="{top + 16:.0f}" font-size="10" text-anchor="middle">'
            f"{number * step:g}</text>"
        )


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= value * (1 - 1e-9))
