"""Memory by rank and kind, as a picture: a bar a rank, a colour a kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.memory.rank_memory import KINDS, RankMemory
from trainwright.sharding.memory.table import UNITS, unit_of

TEXT = "#111111"
COLOURS = {
    "weights": "#7fb2ec",
    "gradients": "#ec9583",
    "states": "#a58fd6",
    "activations": "#7ccb8d",
    "logits": "#2f8f4e",
    "gathered units": "#bcd8f5",
    "reduce buffers": "#f8cdc4",
    "workspace": "#f2c54f",
    "reserve": "#dddddd",
}
"""Fill of each kind."""

_LANE, _BAR, _TOP, _BOTTOM, _AXIS = 26, 20, 56, 36, 640
_LETTER_PX = 6.6


def memory_svg(
    ranks: Mapping[str, RankMemory], *, limit_bytes: int | None = None, title: str = ""
) -> str:
    """Draw what ranks hold as SVG, with the bytes of each part as a tooltip.

    Args:
        ranks: What ranks hold, by what they are called.
        limit_bytes: Of a device, a dashed line; None: there is none.
        title: What stands above.

    Raises:
        ShardingError: There is no rank, or none holds anything.
    """
    most = max([limit_bytes or 0, *(each.total for each in ranks.values())], default=0)
    if not ranks or not most:
        raise ShardingError("a picture needs ranks that hold something")
    unit = unit_of(most)
    left = 16 + _LETTER_PX * max(map(len, ranks))
    scale = _AXIS / most
    height = _TOP + len(ranks) * _LANE + _BOTTOM
    bottom = _TOP + len(ranks) * _LANE
    body = [
        _opening(left + _AXIS + 40, height),
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
        *_legend(ranks),
        *_ticks(most, unit, left, scale, bottom),
        *(part for at, name in enumerate(ranks) for part in _bar(at, name, ranks, left, scale)),
    ]
    if limit_bytes is not None:
        at = left + limit_bytes * scale
        body.append(
            f'<line x1="{at:.1f}" y1="{_TOP - 6}" x2="{at:.1f}" y2="{bottom}" stroke="#c00000" '
            'stroke-width="1.5" stroke-dasharray="5 3"><title>the device</title></line>'
        )
    return "\n".join([*body, "</svg>"]) + "\n"


def _opening(width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif" fill="{TEXT}">'
        '<rect width="100%" height="100%" fill="white"/>'
    )


def _legend(ranks: Mapping[str, RankMemory]) -> Iterator[str]:
    at = 8.0
    for kind in KINDS:
        if any(each.by_kind[kind] for each in ranks.values()):
            yield f'<rect x="{at:.0f}" y="28" width="12" height="12" fill="{COLOURS[kind]}"/>'
            yield f'<text x="{at + 16:.0f}" y="38" font-size="11">{kind}</text>'
            at += 30 + _LETTER_PX * len(kind)


def _bar(
    at: int, name: str, ranks: Mapping[str, RankMemory], left: float, scale: float
) -> Iterator[str]:
    top, start = _TOP + at * _LANE, left
    yield f'<text x="8" y="{top + 14}" font-size="11">{escape(name)}</text>'
    for kind, held in ranks[name].by_kind.items():
        if held:
            said = escape(f"{name}, {kind}: {held:,} bytes")
            yield (
                f'<rect x="{start:.2f}" y="{top}" width="{held * scale:.2f}" height="{_BAR}" '
                f'fill="{COLOURS[kind]}"><title>{said}</title></rect>'
            )
            start += held * scale


def _ticks(most: int, unit: str, left: float, scale: float, bottom: float) -> Iterator[str]:
    """About one mark in 90 pixels, at round numbers."""
    size = UNITS[unit]
    power = 10.0 ** math.floor(math.log10(90 / (scale * size)))
    step = next(power * f for f in (1, 2, 5, 10) if power * f * size * scale >= 90 * (1 - 1e-9))
    for number in range(math.floor(most / size / step + 1e-9) + 1):
        at = left + number * step * size * scale
        yield (
            f'<line x1="{at:.1f}" y1="{_TOP - 4}" x2="{at:.1f}" y2="{bottom:.0f}" '
            'stroke="#999999" stroke-width="0.5"/>'
        )
        yield (
            f'<text x="{at:.1f}" y="{bottom + 16:.0f}" font-size="10" text-anchor="middle">'
            f"{number * step:g} {unit}</text>"
        )
