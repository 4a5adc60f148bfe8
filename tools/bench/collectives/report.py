"""Tables of a sweep: microseconds and speed-ups over the first contestant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import attrs

from tools.bench.collectives.race import Outcomes, Sweep
from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table

SMALL_BYTES = 8


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
    """All cases over one number of ranks."""

    names: tuple[str, ...]
    ranks: int
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, sweeps: Sequence[Sweep], by_rank: Sequence[Sequence[Outcomes]]) -> Report:
        """Return the report on what the ranks have measured, in sweeps of the same contestants."""
        rows: list[Row] = []
        for number, sweep in enumerate(sweeps):
            rows += _rows(sweep, [rank[number] for rank in by_rank])
        return cls(sweeps[0].names, len(by_rank), tuple(rows))

    def kinds(self) -> list[tuple[str, str]]:
        """Return operation and dtype of the cases of large tensors."""
        large = [row for row in self.rows if row.num_bytes > SMALL_BYTES]
        return list(dict.fromkeys((row.operation, row.dtype) for row in large))

    def format(self) -> str:
        """Return the table of all cases."""
        names = self.names
        head = ["operation", "dtype", "bytes", *(f"{name} us" for name in names)]
        head += [f"{name} speed-up" for name in names[1:]]
        table = []
        for row in self.rows:
            line = [row.operation, row.dtype, _format_bytes(row.num_bytes)]
            line += [f"{row.microseconds[name]:.0f}" for name in names]
            table.append([*line, *(row.speedups[name].format(1) for name in names[1:])])
        return f"{self.ranks} ranks\n{format_table(head, table)}\n"

    def speedups(self, name: str, operation: str = "", dtype: str = "") -> list[float]:
        """Return the medians of one contestant in the cases of large tensors, or some of them."""
        return [
            row.speedups[name].median
            for row in self.rows
            if row.num_bytes > SMALL_BYTES
            and operation in ("", row.operation)
            and dtype in ("", row.dtype)
        ]

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {"ranks": self.ranks, "rows": [attrs.asdict(row) for row in self.rows]}


def _rows(sweep: Sweep, by_rank: Sequence[Outcomes]) -> list[Row]:
    rows = []
    for number, (operation, dtype, num_bytes) in enumerate(sweep.cases()):
        seconds = {
            name: slowest_rank([rank[number][name] for rank in by_rank]) for name in sweep.names
        }
        reference = seconds[sweep.names[0]]
        micros = {name: 1e6 * statistics.median(times) for name, times in seconds.items()}
        speedups = {name: ratios(reference, times) for name, times in seconds.items()}
        rows.append(Row(operation, dtype, num_bytes, micros, speedups))
    return rows


def _format_bytes(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"
