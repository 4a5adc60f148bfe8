"""Time shared memory against Gloo: ``python -m tools.bench.collectives --help``."""

from __future__ import annotations

import argparse
import json
import sys

from tools.bench import machine
from tools.bench.collectives.contestants import CONTESTANTS, OPERATIONS
from tools.bench.collectives.race import Sweep, race
from tools.bench.collectives.report import SMALL_BYTES, Report
from tools.bench.collectives.summary import summarize
from tools.bench.processes import run_job

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
DTYPES = ("float32", "bfloat16")


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    sweeps = [
        Sweep(chosen.names, chosen.operations, chosen.dtypes, chosen.sizes, chosen.rounds),
        Sweep(chosen.names, ("all_reduce",), ("float32",), (SMALL_BYTES,), chosen.rounds),
    ]
    reports = []
    for ranks in chosen.ranks:
        outcomes = run_job(race, ranks, sweeps, deadline_s=chosen.deadline_s)
        reports.append(Report.of(sweeps, outcomes))
    about = machine.describe()
    if chosen.json:
        data = {"machine": about, "reports": [report.as_data() for report in reports]}
        print(json.dumps(data, indent=1))
        return 0
    for report in reports:
        print(report.format())
    print(f"{about}; processes of one thread\n\n{summarize(reports)}")
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.collectives")
    parser.add_argument("--ranks", default="2,4", help="numbers of processes, one thread each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--names", default="gloo,shm,resident", help="the first is the reference")
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of the large one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=900.0)
    chosen = parser.parse_args(words)
    for name, known in (("names", CONTESTANTS), ("operations", OPERATIONS), ("dtypes", DTYPES)):
        parts = tuple(getattr(chosen, name).split(","))
        if unknown := set(parts) - set(known):
            parser.error(f"--{name}: no {', '.join(sorted(unknown))}; there are {list(known)}")
        setattr(chosen, name, parts)
    chosen.sizes = tuple(int(size) for size in chosen.sizes.split(","))
    chosen.ranks = tuple(int(ranks) for ranks in chosen.ranks.split(","))
    if min(chosen.rounds, *chosen.sizes) < 1 or min(chosen.ranks) < 2:
        parser.error("--ranks must be at least 2, --rounds and --sizes at least 1")
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
