"""Tables of a sweep: microseconds and speed-ups over the first contestant."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import attrs

from tools.bench.collectives.race import Sweep
from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table

SMALL_BYTES = 8

# The smallest geometric mean and the smallest single speed-up, for two ranks and for more.
TARGETS = {"shm": ((5.0, 3.5), (4.0, 3.0)), "resident": ((10.0, 7.0), (7.0, 5.0))}
SMALL_TARGET = 10.0


@attrs.frozen
class Row:
    """One case: microseconds by contestant, and speed-ups over the reference."""

    operation: str
    dtype: str
    num_bytes: int
    microseconds: dict[str, float]
    speedups: dict[str, Spread]


@attrs.frozen
class Report:
    """The rows of a sweep over some ranks."""

    sweep: Sweep
    ranks: int
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, sweep: Sweep, by_rank: Sequence[Sequence[dict[str, list[float]]]]) -> Report:
        """Return the report on what the ranks have measured."""
        rows = []
        for number, (operation, dtype, num_bytes) in enumerate(sweep.cases()):
            seconds = {
                name: slowest_rank([rank[number][name] for rank in by_rank]) for name in sweep.names
            }
            reference = seconds[sweep.names[0]]
            micros = {name: 1e6 * statistics.median(times) for name, times in seconds.items()}
            speedups = {name: ratios(reference, times) for name, times in seconds.items()}
            rows.append(Row(operation, dtype, num_bytes, micros, speedups))
        return cls(sweep, len(by_rank), tuple(rows))

    def format(self) -> str:
        """Return the table of all cases, and below it the targets."""
        names = self.sweep.names
        head = ["operation", "dtype", "bytes", *(f"{name} us" for name in names)]
        head += [f"{name} speed-up" for name in names[1:]]
        table = []
        for row in self.rows:
            line = [row.operation, row.dtype, _format_bytes(row.num_bytes)]
            line += [f"{row.microseconds[name]:.0f}" for name in names]
            table.append([*line, *(row.speedups[name].format(1) for name in names[1:])])
        return "\n".join([format_table(head, table), "", *self.verdicts()])

    def verdicts(self) -> list[str]:
        """Return one line a target: met, or missed by what."""
        lines = []
        for name in self.sweep.names[1:]:
            if name not in TARGETS:
                continue
            mean, least = TARGETS[name][self.ranks > 2]
            medians = [r.speedups[name].median for r in self.rows if r.num_bytes > SMALL_BYTES]
            if medians:
                found = math.exp(statistics.fmean(math.log(median) for median in medians))
                verdict = "met" if found >= mean and min(medians) >= least else "MISSED"
                lines.append(
                    f"{name}: geometric mean {found:.1f} (at least {mean:.1f}), smallest "
                    f"{min(medians):.1f} (at least {least:.1f}): {verdict}"
                )
            small = [r.speedups[name].median for r in self.rows if r.num_bytes == SMALL_BYTES]
            if small:
                verdict = "met" if min(small) >= SMALL_TARGET else "MISSED"
                lines.append(
                    f"{name}: {SMALL_BYTES} bytes {min(small):.1f} times as fast (at least "
                    f"{SMALL_TARGET:.0f}): {verdict}"
                )
        return lines

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"rows": [attrs.asdict(row) for row in self.rows], "verdicts": self.verdicts()}


def _format_bytes(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"
