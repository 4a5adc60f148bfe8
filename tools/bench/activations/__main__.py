"""Time the planners of activations: ``python -m tools.bench.activations --help``."""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from tools.bench import machine
from tools.bench.activations import planning
from tools.bench.table import format_table


def main(words: list[str]) -> int:
    """Run what the command line asks for; return 1 if a target is missed."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    outcomes = planning.run(chosen.layers, chosen.steps)
    if chosen.json:
        about = {"machine": machine.describe(), "layers": chosen.layers, "steps": chosen.steps}
        print(json.dumps({**about, "plans": [attrs.asdict(each) for each in outcomes]}, indent=1))
    else:
        print(f"{machine.describe()}; {chosen.layers} layers, {chosen.steps} steps")
        print(
            format_table(["plan", "seconds", "time/keep all", "gap %", "spare %"], _rows(outcomes))
        )
    slowest = max(outcome.seconds for outcome in outcomes)
    met = slowest < planning.TARGET_S
    if not chosen.json:
        print(f"slowest {slowest:.1f} s, target {planning.TARGET_S:.0f} s: {_verdict(met)}")
    return 0 if met else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.activations")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500, help="sizes of memory told apart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(words)
    if min(chosen.layers, chosen.steps) < 1:
        parser.error("--layers and --steps must be at least 1")
    return chosen


def _rows(outcomes: list[planning.Outcome]) -> list[list[str]]:
    return [
        [
            each.case,
            f"{each.seconds:.2f}",
            f"{each.slowdown:.3f}",
            f"{100 * each.gap:.2f}",
            f"{100 * each.spare:.2f}",
        ]
        for each in outcomes
    ]


def _verdict(met: bool) -> str:
    return "met" if met else "MISSED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
