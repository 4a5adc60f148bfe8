"""Time tensor parallelism against PyTorch's: ``python -m tools.bench.tensor_parallel --help``."""

from __future__ import annotations

import argparse
import json
import sys

from tools.bench import machine
from tools.bench.processes import run_job
from tools.bench.tensor_parallel import blocks, heads
from tools.bench.tensor_parallel.block import SHAPES
from tools.bench.tensor_parallel.race import Plan, race
from tools.bench.tensor_parallel.report import Report

STEPS = {"block": 5, "cross-entropy": 1}
_NAMES = {"block": tuple(blocks.builders()), "cross-entropy": tuple(heads.builders())}


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code, 1 if contestants differ."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    reports = [run(chosen, kind) for kind in chosen.kinds]
    if chosen.json:
        about = {"machine": machine.describe(), "ranks": chosen.ranks, "size": chosen.size}
        data = {report.plan.kind: report.as_data() for report in reports}
        print(json.dumps({**about, **data}, indent=1))
    return 0 if all(report.agrees for report in reports) else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.tensor_parallel")
    parser.add_argument("--only", choices=list(STEPS), help="default: both")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--size", choices=list(SHAPES), default="small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps-per-round",
        type=int,
        help="default: " + ", ".join(f"{steps} of a {kind}" for kind, steps in STEPS.items()),
    )
    parser.add_argument(
        "--names",
        help="comma-separated contestants, the references among them; block: "
        f"{', '.join(_NAMES['block'])}; cross-entropy: {', '.join(_NAMES['cross-entropy'])}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=1800.0)
    chosen = parser.parse_args(words)
    chosen.kinds = [chosen.only] if chosen.only else list(STEPS)
    counts = [chosen.ranks, chosen.rounds, chosen.steps_per_round or 1]
    if min(counts) < 1 or chosen.steps_per_round == 0:
        parser.error("--ranks, --rounds and --steps-per-round must be at least 1")
    known = {name for kind in chosen.kinds for name in _NAMES[kind]}
    chosen.names = known if chosen.names is None else set(chosen.names.split(","))
    if unknown := chosen.names - known:
        parser.error(f"no contestant {', '.join(sorted(unknown))}; there are {sorted(known)}")
    return chosen


def run(chosen: argparse.Namespace, kind: str) -> Report:
    """Time the contestants of one kind, and print the table unless data are wanted."""
    names = tuple(name for name in _NAMES[kind] if name in chosen.names)
    steps = chosen.steps_per_round or STEPS[kind]
    plan = Plan(kind, chosen.size, names, steps, chosen.rounds)
    outcomes = run_job(race, chosen.ranks, plan, deadline_s=chosen.deadline_s)
    report = Report.of(plan, outcomes)
    if not chosen.json:
        print(f"{machine.describe()}; {chosen.ranks} ranks of one thread")
        print(report.format())
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
