"""Time plans of activations, made and carried out: ``python -m tools.bench.activations --help``."""

from __future__ import annotations

import argparse
import json
import sys

import attrs
import torch

from tools.bench import machine
from tools.bench.activations import applied, planning
from tools.bench.table import format_table


def main(words: list[str]) -> int:
    """Run what the command line asks for; return 1 if a target is missed."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    if chosen.only == "applied":
        return _applied(chosen)
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
    return max(0 if met else 1, 0 if chosen.only else _applied(chosen))


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.activations")
    parser.add_argument(
        "--only", choices=["planning", "applied"], help="plans, or plans carried out"
    )
    parser.add_argument("--rounds", type=int, default=7, help="steps of each contestant")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500, help="sizes of memory told apart")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args(words)
    if min(chosen.layers, chosen.steps, chosen.rounds) < 1:
        parser.error("--layers, --steps and --rounds must be at least 1")
    return chosen


def _applied(chosen: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    found = applied.measure_applied(chosen.rounds)
    print(json.dumps(found, indent=1) if chosen.json else applied.describe_applied(found))
    return 0 if found["met"] else 1


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
