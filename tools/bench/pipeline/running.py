"""Time the executor against PyTorch's runtime, and its bubbles against the simulated ones.

``python -m tools.bench.pipeline.running --help``
"""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from tools.bench import machine
from tools.bench.pipeline.bubbles import Bubble, measure_bubbles
from tools.bench.pipeline.contestants import Job
from tools.bench.pipeline.race import Race, run_race
from tools.bench.processes import run_job
from tools.bench.rounds import ratios, slowest_rank
from tools.bench.table import format_table

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
RATIO_TARGET = 1.0
BUBBLE_TARGET = 0.03
TOLERANCE = 1e-5


def main(words: list[str]) -> int:
    """Do what the command line asks for; return the exit code, 1 if gradients differ."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    data: dict[str, object] = {"machine": machine.describe()}
    if not chosen.json:
        print(f"{machine.describe()}; two processes of one thread over Gloo")
    agree = True
    if chosen.what in ("race", "both"):
        jobs = [Job(name) for name in chosen.only]
        races = run_job(
            run_race, 2, jobs, chosen.rounds, chosen.steps, deadline_s=chosen.deadline_s
        )
        agree = all(race.error <= TOLERANCE for race in races[0])
        data["race"] = [[attrs.asdict(race) for race in rank] for rank in races]
        if not chosen.json:
            print(describe_race(races))
    if chosen.what in ("bubbles", "both"):
        jobs = [Job(name, width=chosen.width, rows=chosen.rows) for name in chosen.only]
        bubbles = run_job(measure_bubbles, 2, jobs, chosen.rounds, deadline_s=chosen.deadline_s)[0]
        data["bubbles"] = [attrs.asdict(bubble) for bubble in bubbles]
        if not chosen.json:
            print(describe_bubbles(bubbles))
    if chosen.json:
        print(json.dumps(data, indent=1))
    return 0 if agree else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.pipeline.running")
    parser.add_argument(
        "what",
        nargs="?",
        choices=["race", "bubbles", "both"],
        default="both",
        help="race: steps of four tiny layers against PyTorch's runtime on the same schedule; "
        "bubbles: of wider layers, measured and simulated with measured costs",
    )
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of a round of the race")
    parser.add_argument("--width", type=int, default=512, help="of the layers of the bubbles")
    parser.add_argument("--rows", type=int, default=256, help="of a microbatch of the bubbles")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=900.0)
    chosen = parser.parse_args(words)
    if min(chosen.rounds, chosen.steps, chosen.width, chosen.rows) < 1:
        parser.error("--rounds, --steps, --width and --rows must be at least 1")
    return chosen


def describe_race(races: list[list[Race]]) -> str:
    """Return a table: what a step takes on the slowest rank, and the ratio within each round."""
    rows = []
    for number, race in enumerate(races[0]):
        ours = slowest_rank([rank[number].ours for rank in races])
        theirs = slowest_rank([rank[number].theirs for rank in races])
        spread = ratios(ours, theirs)
        verdict = "met" if spread.median <= RATIO_TARGET else "MISSED"
        cells = [f"{1e3 * min(times):.2f}" for times in (ours, theirs)]
        rows.append([race.schedule, *cells, spread.format(), verdict, f"{race.error:.0e}"])
    head = ["four tiny layers, 8 microbatches", "ours ms", "torch ms", "ratio", "<= 1", "error"]
    return format_table(head, rows)


def describe_bubbles(bubbles: list[Bubble]) -> str:
    """Return a table of bubbles, as parts of the whole."""
    rows = []
    for bubble in bubbles:
        apart = bubble.measured - bubble.simulated
        verdict = "met" if abs(apart) <= BUBBLE_TARGET else "MISSED"
        shares = [f"{share:.3f}" for share in (bubble.measured, bubble.simulated)]
        costs = " ".join(f"{name}={1e3 * cost:.2f}" for name, cost in bubble.costs.items())
        rows.append([bubble.schedule, *shares, f"{apart:+.3f}", verdict, costs])
    head = ["bubble of the whole", "measured", "simulated", "apart", "3 points", "ms"]
    return format_table(head, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
