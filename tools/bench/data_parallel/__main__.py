"""Time data parallelism against PyTorch's own: ``python -m tools.bench.data_parallel --help``."""

from __future__ import annotations

import argparse
import json
import sys

import attrs

from tools.bench import machine
from tools.bench.data_parallel.contestants import builders
from tools.bench.data_parallel.costs import explain
from tools.bench.data_parallel.footprint import Footprint, format_footprints, hold
from tools.bench.data_parallel.gpt import BATCHES, SHAPES
from tools.bench.data_parallel.measure import Plan, measure
from tools.bench.data_parallel.report import Report
from tools.bench.data_parallel.worlds import COMMS, GLOO
from tools.bench.processes import run_job

STEPS = {"compute": 3, "comm": 5}
MEMORY_STEPS = 4


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code."""
    chosen = parse(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    kinds = tuple(BATCHES) if chosen.batch == "both" else (chosen.batch,)
    if chosen.profile:
        return profile(chosen, kinds)
    if chosen.memory:
        return weigh(chosen, kinds)
    return race(chosen, kinds)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    names = list(builders())
    parser = argparse.ArgumentParser(prog="python -m tools.bench.data_parallel")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--comm", choices=COMMS, default=GLOO, help="what carries the stages")
    parser.add_argument("--batch", choices=[*BATCHES, "both"], default="both")
    parser.add_argument("--model", choices=list(SHAPES), default="small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps-per-round",
        type=int,
        help="default: " + ", ".join(f"{steps} at {kind}" for kind, steps in STEPS.items()),
    )
    parser.add_argument(
        "--only",
        metavar="NAMES",
        help="comma-separated contestants, the references among them: " + ", ".join(names),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--memory", action="store_true", help="peak memory, each alone")
    parser.add_argument("--profile", metavar="NAME", choices=names, help="top costs of one step")
    parser.add_argument("--deadline-s", type=float, default=1800.0)
    chosen = parser.parse_args(words)
    chosen.names = tuple(names) if chosen.only is None else tuple(chosen.only.split(","))
    if unknown := set(chosen.names) - set(names):
        parser.error(f"no contestant {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    counts = [chosen.ranks, chosen.rounds, chosen.steps_per_round or 1]
    if min(counts) < 1 or chosen.steps_per_round == 0:
        parser.error("--ranks, --rounds and --steps-per-round must be at least 1")
    return chosen


def race(chosen: argparse.Namespace, kinds: tuple[str, ...]) -> int:
    """Time the contestants and print ratios; the exit code is 1 if their weights differ."""
    steps = {kind: chosen.steps_per_round or STEPS[kind] for kind in kinds}
    plan = Plan(chosen.model, chosen.names, steps, chosen.rounds, chosen.comm)
    outcomes = run_job(measure, chosen.ranks, plan, deadline_s=chosen.deadline_s)
    report = Report.of(plan, outcomes)
    if chosen.json:
        about = {
            "machine": machine.describe(),
            "ranks": chosen.ranks,
            "model": chosen.model,
            "comm": chosen.comm,
        }
        print(json.dumps({**about, **report.as_data()}, indent=1))
    else:
        print(_title(chosen))
        print(report.format())
    return 0 if report.agrees else 1


def weigh(chosen: argparse.Namespace, kinds: tuple[str, ...]) -> int:
    """Run each contestant alone and print its peak memory."""
    data = {}
    steps = chosen.steps_per_round or MEMORY_STEPS
    if not chosen.json:
        print(_title(chosen))
    for kind in kinds:
        found: dict[str, Footprint | str] = {}
        for name in chosen.names:
            parts = run_job(
                hold,
                chosen.ranks,
                chosen.model,
                name,
                kind,
                steps,
                chosen.comm,
                deadline_s=chosen.deadline_s,
            )
            missing = [part for part in parts if isinstance(part, str)]
            found[name] = missing[0] if missing else Footprint.of_job(parts)
        data[kind] = {n: f if isinstance(f, str) else attrs.asdict(f) for n, f in found.items()}
        if not chosen.json:
            print(format_footprints(found, kind))
    if chosen.json:
        print(json.dumps({"machine": machine.describe(), "bytes": data}, indent=1))
    return 0


def profile(chosen: argparse.Namespace, kinds: tuple[str, ...]) -> int:
    """Print where the time of one contestant's step goes on the first rank."""
    print(_title(chosen))
    for kind in kinds:
        steps = chosen.steps_per_round or STEPS[kind]
        texts = run_job(
            explain,
            chosen.ranks,
            chosen.model,
            chosen.profile,
            kind,
            steps,
            chosen.comm,
            deadline_s=chosen.deadline_s,
        )
        print(texts[0])
    return 0


def _title(chosen: argparse.Namespace) -> str:
    ranks = f"{chosen.ranks} ranks of one thread"
    return f"{machine.describe()}; {ranks}, model {chosen.model}, stages over {chosen.comm}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
