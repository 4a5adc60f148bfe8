"""Time dispatch and combine: ``python -m tools.bench.experts --help``."""

from __future__ import annotations

import argparse
import gc
import json
import sys

from tools.bench import machine
from tools.bench.experts.contestants import SIZES, Bare, Contestant, Ours
from tools.bench.processes import run_job, time_steps
from tools.bench.rounds import interleave, ratios, slowest_rank
from tools.bench.table import format_table
from trainwright.collectives import Communicator, SharedMemoryCommunicator

TARGET = 1.3


def main(words: list[str]) -> int:
    """Run what the command line asks for; return 1 where the target is missed."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    by_rank = run_job(
        race,
        chosen.ranks,
        chosen.size,
        chosen.comm,
        chosen.rounds,
        chosen.steps_per_round,
        deadline_s=chosen.deadline_s,
    )
    seconds = {name: slowest_rank([times[name] for times in by_rank]) for name in by_rank[0]}
    spreads = {name: ratios(times, seconds["bare"]) for name, times in seconds.items()}
    is_met = spreads["ours"].median <= TARGET
    if chosen.json:
        print(json.dumps({"machine": machine.describe(), "seconds": seconds}, indent=1))
        return 0 if is_met else 1
    size = SIZES[chosen.size]
    print(
        f"{machine.describe()}; {chosen.ranks} ranks of one thread over {chosen.comm}; "
        f"{size.tokens} tokens a rank of width {size.width}, {size.routing.top_k} of "
        f"{size.routing.num_experts} experts"
    )
    rows = [
        [name, f"{min(times) * 1e3:.1f}", spreads[name].format()] for name, times in seconds.items()
    ]
    print(format_table(["dispatch and combine", "ms", "of bare"], rows))
    verdict = "met" if is_met else "MISSED"
    print(f"ours / bare {spreads['ours'].median:.2f}, at most {TARGET}: {verdict}")
    return 0 if is_met else 1


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.experts")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--comm", choices=["gloo", "shm"], default="gloo")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    chosen = parser.parse_args(words)
    if min(chosen.ranks, chosen.rounds, chosen.steps_per_round) < 1:
        parser.error("--ranks, --rounds and --steps-per-round must be at least 1")
    return chosen


def race(
    world: Communicator, size: str, comm: str, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Time the contestants in turn, all alive in the same processes."""
    carrier: Communicator = SharedMemoryCommunicator() if comm == "shm" else world
    contestants: dict[str, Contestant] = {
        "bare": Bare(carrier, SIZES[size]),
        "ours": Ours(carrier, SIZES[size]),
        "planned": Ours(carrier, SIZES[size], plans=False),
    }
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for order in interleave(list(contestants), rounds):
        for name in order:
            seconds[name].append(time_steps(contestants[name].step, steps))
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
