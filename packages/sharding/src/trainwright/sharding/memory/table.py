"""Memory by rank and kind, as text."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.memory.conventions import GIB
from trainwright.sharding.memory.rank_memory import KINDS, RankMemory

UNITS = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10, "B": 1}


def unit_of(most: int) -> str:
    """Return the largest unit of which there is at least one."""
    return next(unit for unit, size in UNITS.items() if most >= size or size == 1)


def memory_table(ranks: Mapping[str, RankMemory], *, unit: str | None = None) -> str:
    """Return a table with a line a rank and a column a kind that some rank has.

    What is not on the device stands behind the total, which does not hold it.

    Args:
        ranks: What ranks hold, by what they are called.
        unit: One of `UNITS`; None: the largest that fits.

    Raises:
        ShardingError: There is no rank, or no such unit.
    """
    if not ranks:
        raise ShardingError("a table needs at least one rank")
    if unit is not None and unit not in UNITS:
        raise ShardingError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    chosen = unit or unit_of(max(each.total for each in ranks.values()))
    used = [kind for kind in KINDS if any(each.by_kind[kind] for each in ranks.values())]
    apart = [place for place in ("host", "file") if any(getattr(r, place) for r in ranks.values())]
    rows = [[f"in {chosen}", *used, "total", *(f"in {place}" for place in apart), "most during"]]
    for name, each in ranks.items():
        held = [each.by_kind[kind] for kind in used]
        other = [getattr(each, place) for place in apart]
        numbers = [_number(value, chosen) for value in (*held, each.total, *other)]
        rows.append([name, *numbers, each.moment])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return "\n".join(lines)


def _number(value: int, unit: str) -> str:
    return f"{value / UNITS[unit]:.2f}" if UNITS[unit] > 1 else f"{value}"
