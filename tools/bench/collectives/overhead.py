"""Time what a communicator adds to small calls: ``python -m tools.bench.collectives.overhead``.

Each operation is called on a few bytes by PyTorch's own function, by `TorchCommunicator` (messages
over Gloo, with sums in rank order), and by way of the group's own operations, as with NCCL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import attrs

from tools.bench import machine
from tools.bench.collectives.small_calls import NAMES, NUMEL, Seconds, time_calls
from tools.bench.processes import run_job
from tools.bench.rounds import slowest_rank
from tools.bench.table import format_table

TARGET_US = 15.0


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.collectives.overhead")
    parser.add_argument("--ranks", default="1,2", help="numbers of processes of one thread each")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="calls a round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    chosen = parser.parse_args(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    reports = []
    for ranks in map(int, chosen.ranks.split(",")):
        seconds = run_job(
            time_calls, ranks, chosen.rounds, chosen.steps, deadline_s=chosen.deadline_s
        )
        reports.append(Report.of(seconds))
    if chosen.json:
        print(json.dumps([attrs.asdict(report) for report in reports], indent=1))
        return 0
    print(f"{machine.describe()}; processes of one thread, {NUMEL} float32 a rank")
    for report in reports:
        print(report.format())
    return 0


@attrs.frozen
class Report:
    """Microseconds of each operation by contestant, and what ours add to PyTorch's own.

    A time is that of the quickest of many short rounds: whatever else the machine does can only
    lengthen one.
    """

    ranks: int
    microseconds: dict[str, dict[str, float]]
    medians: dict[str, dict[str, float]]

    @classmethod
    def of(cls, by_rank: list[Seconds]) -> Report:
        """Return the report on what the ranks have measured."""
        microseconds: dict[str, dict[str, float]] = {}
        medians: dict[str, dict[str, float]] = {}
        for name in by_rank[0]:
            times = {way: slowest_rank([rank[name][way] for rank in by_rank]) for way in NAMES}
            microseconds[name] = {way: 1e6 * min(times[way]) for way in NAMES}
            medians[name] = {way: 1e6 * statistics.median(times[way]) for way in NAMES}
        return cls(len(by_rank), microseconds, medians)

    def added(self, name: str, way: str) -> float:
        """Return by how many microseconds a call of ours takes longer."""
        return self.microseconds[name][way] - self.microseconds[name][NAMES[0]]

    def format(self) -> str:
        """Return the table of all operations, and below it the target."""
        head = ["operation", *(f"{way} us" for way in NAMES), *(f"{w} adds" for w in NAMES[1:])]
        head += [f"{way} median" for way in NAMES]
        rows = [
            [
                name,
                *(f"{times[way]:.1f}" for way in NAMES),
                *(f"{self.added(name, way):+.1f}" for way in NAMES[1:]),
                *(f"{self.medians[name][way]:.1f}" for way in NAMES),
            ]
            for name, times in self.microseconds.items()
        ]
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return "\n".join([ranks, format_table(head, rows), *self.verdicts(), ""])

    def verdicts(self) -> list[str]:
        """Return one line a contestant: the target met, or missed by what."""
        lines = []
        for way in NAMES[1:]:
            worst = max(self.microseconds, key=lambda name: self.added(name, way))
            most = self.added(worst, way)
            verdict = "met" if most <= TARGET_US else "MISSED"
            lines.append(
                f"{way}: {most:+.1f} us a call at most, in {worst} (at most {TARGET_US:+.0f}): "
                f"{verdict}"
            )
        return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
