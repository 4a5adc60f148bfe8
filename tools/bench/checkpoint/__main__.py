"""Time checkpoints beside PyTorch's: ``python -m tools.bench.checkpoint --help``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tools.bench import machine
from tools.bench.checkpoint.race import KINDS, Plan, race
from tools.bench.checkpoint.report import Report
from tools.bench.processes import run_job


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code, 1 if a load gave other bits."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    kinds = (chosen.only,) if chosen.only else KINDS
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=chosen.folder) as folder:
        plan = Plan(Path(folder), chosen.gib, kinds, chosen.rounds, chosen.cold)
        outcomes = run_job(race, chosen.ranks, plan, deadline_s=chosen.deadline_s)
    report = Report(plan, outcomes)
    if chosen.json:
        about = {"machine": machine.describe(), "ranks": chosen.ranks}
        print(json.dumps({**about, **report.as_data()}, indent=1))
    else:
        print(f"{machine.describe()}; {chosen.ranks} ranks of one thread over Gloo")
        print(report.format())
    return 0 if report.agrees else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.checkpoint")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the whole state")
    parser.add_argument("--folder", type=Path, help="where files go; default: a temporary folder")
    parser.add_argument("--only", choices=KINDS, help="default: all")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--rounds", type=int, default=5, help="one more is not counted")
    parser.add_argument(
        "--cold", action="store_true", help="let files leave the page cache before each load"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=1800.0)
    chosen = parser.parse_args(words)
    if min(chosen.ranks, chosen.rounds) < 1 or not 0 < chosen.gib < 1024:
        parser.error("--ranks and --rounds must be at least 1, --gib greater than 0")
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
