"""Time rings over messages against Gloo's own: ``python -m tools.bench.collectives.rings``."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

import attrs

from tools.bench import machine
from tools.bench.collectives.ring_race import ALGORITHMS, REFERENCE, Seconds, time_all_reduces
from tools.bench.processes import run_job
from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table

SIZES = (1 << 16, 1 << 20, 1 << 24, 1 << 26)
TARGETS = {"ring": 1.5}
"""The largest ratio to Gloo's time, at each size."""


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.collectives.rings")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes of one thread each")
    parser.add_argument("--names", default="ring", help=f"some of {', '.join(ALGORITHMS)}")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    chosen = parser.parse_args(words)
    names = tuple(chosen.names.split(","))
    if unknown := set(names) - set(ALGORITHMS):
        parser.error(f"--names: no {', '.join(sorted(unknown))}; there are {list(ALGORITHMS)}")
    sizes = tuple(int(size) for size in chosen.sizes.split(","))
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    reports = []
    for ranks in map(int, chosen.ranks.split(",")):
        args = (names, sizes, chosen.rounds)
        outcomes = run_job(time_all_reduces, ranks, *args, deadline_s=chosen.deadline_s)
        reports.append(Report.of(names, sizes, outcomes))
    if chosen.json:
        about: dict[str, Any] = {"machine": machine.describe()}
        print(json.dumps({**about, "reports": [attrs.asdict(each) for each in reports]}, indent=1))
        return 0
    print(f"{machine.describe()}; processes of one thread, all-reduce of float32")
    for report in reports:
        print(report.format())
    return 0


@attrs.frozen
class Row:
    """One size: microseconds by contestant, and ratios to Gloo's within each round."""

    num_bytes: int
    microseconds: dict[str, float]
    ratios: dict[str, Spread]


@attrs.frozen
class Report:
    """The rows of a number of ranks."""

    ranks: int
    names: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def of(
        cls, names: tuple[str, ...], sizes: tuple[int, ...], by_rank: list[list[Seconds]]
    ) -> Report:
        """Return the report on what the ranks have measured."""
        rows = []
        for number, num_bytes in enumerate(sizes):
            every = (REFERENCE, *names)
            times = {name: slowest_rank([rank[number][name] for rank in by_rank]) for name in every}
            micros = {name: 1e6 * statistics.median(times[name]) for name in every}
            found = {name: ratios(times[name], times[REFERENCE]) for name in names}
            rows.append(Row(num_bytes, micros, found))
        return cls(len(by_rank), names, tuple(rows))

    def format(self) -> str:
        """Return the table of all sizes, and below it the targets."""
        head = ["KiB", f"{REFERENCE} us", *(f"{name} us" for name in self.names)]
        head += [f"{name} / {REFERENCE}" for name in self.names]
        table = [
            [
                f"{row.num_bytes / 1024:g}",
                *(f"{row.microseconds[name]:.0f}" for name in (REFERENCE, *self.names)),
                *(row.ratios[name].format() for name in self.names),
            ]
            for row in self.rows
        ]
        return "\n".join([f"{self.ranks} ranks", format_table(head, table), *self.verdicts(), ""])

    def verdicts(self) -> list[str]:
        """Return one line a target: met, or missed by what."""
        lines = []
        for name in self.names:
            if name in TARGETS:
                worst = max(row.ratios[name].median for row in self.rows)
                verdict = "met" if worst <= TARGETS[name] else "MISSED"
                lines.append(
                    f"{name}: at most {worst:.2f} of {REFERENCE}'s time (at most "
                    f"{TARGETS[name]:.2f}): {verdict}"
                )
        return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
