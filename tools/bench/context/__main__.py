"""Time attention shared along the sequence: ``python -m tools.bench.context --help``."""

from __future__ import annotations

import argparse
import json
import sys

from tools.bench import machine
from tools.bench.context.contestants import SHAPES, builders
from tools.bench.context.race import Plan, race
from tools.bench.context.report import Report
from tools.bench.processes import run_job

_NAMES = tuple(builders(SHAPES["tiny"]))


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code, 1 if contestants differ."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    names = tuple(name for name in _NAMES if name in chosen.names)
    plan = Plan(chosen.size, names, chosen.steps_per_round, chosen.rounds)
    report = Report.of(plan, run_job(race, chosen.ranks, plan, deadline_s=chosen.deadline_s))
    if chosen.json:
        about = {"machine": machine.describe()}
        print(json.dumps({**about, **report.as_data()}, indent=1))
    else:
        print(f"{machine.describe()}; {chosen.ranks} ranks of one thread")
        print(report.format())
    return 0 if report.agrees else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.context")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--size", choices=list(SHAPES), default="long")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=1)
    parser.add_argument(
        "--names",
        help=f"comma-separated contestants of {', '.join(_NAMES)}; "
        "default: single, exchange and ring",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=1800.0)
    chosen = parser.parse_args(words)
    if min(chosen.ranks, chosen.rounds, chosen.steps_per_round) < 1:
        parser.error("--ranks, --rounds and --steps-per-round must be at least 1")
    default = "single,exchange,ring" if chosen.names is None else chosen.names
    chosen.names = set(default.split(","))
    if unknown := chosen.names - set(_NAMES):
        parser.error(f"no contestant {', '.join(sorted(unknown))}; there are {sorted(_NAMES)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
