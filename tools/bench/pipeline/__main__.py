"""Time and check the planning of pipelines: ``python -m tools.bench.pipeline --help``."""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from tools.bench import machine
from tools.bench.pipeline.planning import (
    TARGETS,
    check_all,
    describe,
    is_met,
    measure,
)
from trainwright.pipeline_schedules import GENERATORS


def main(words: list[str]) -> int:
    """Do what the command line asks for; return the exit code, 1 if a target is missed."""
    chosen = parse(words)
    if chosen.all:
        for line in check_all(
            chosen.only or list(GENERATORS), chosen.ranks, chosen.microbatches, chosen.chunks
        ):
            print(line, flush=True)
        return 0
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    outcomes = [(target, measure(target.plans)) for target in TARGETS]
    if chosen.json:
        print(
            json.dumps(
                [
                    {"target": attrs.asdict(target), "costs": [attrs.asdict(c) for c in costs]}
                    for target, costs in outcomes
                ],
                indent=1,
            )
        )
    else:
        print(machine.describe())
        print("\n\n".join(describe(target, costs) for target, costs in outcomes))
    return 0 if all(is_met(target, costs) for target, costs in outcomes) else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.pipeline")
    parser.add_argument(
        "--all",
        action="store_true",
        help="instead of timing: verify every generator at every size up to those below, plain "
        "and lowered, with rendezvous, one-message and buffered sends, within its memory",
    )
    parser.add_argument(
        "--only", choices=list(GENERATORS), nargs="+", help="of --all; default: all"
    )
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=33)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON list of the timings")
    chosen = parser.parse_args(words)
    if not chosen.all and (chosen.only, chosen.ranks, chosen.microbatches, chosen.chunks) != (
        *(parser.get_default(name) for name in ("only", "ranks", "microbatches", "chunks")),
    ):
        parser.error("--only, --ranks, --microbatches and --chunks go with --all")
    if min(chosen.ranks, chosen.microbatches, chosen.chunks) < 1:
        parser.error("--ranks, --microbatches and --chunks must be at least 1")
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
