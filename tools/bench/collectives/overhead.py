"""Time what a communicator adds to small calls: ``python -m tools.bench.collectives.overhead``.

Each operation is called on a few bytes by PyTorch's own function, by `TorchCommunicator` (messages
over Gloo, with sums in rank order), and by way of the group's own operations, as with NCCL.

What a call adds is judged by the time that processors work for it, in all threads of a rank: how
long messages take, and threads to wake, varies by more than the target from run to run.
"""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument("--operations", default="", help="some of them, by commas; default all")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--steps", type=int, default=20, help="calls a round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--deadline-s", type=float, default=300.0)
    chosen = parser.parse_args(words)
    if warning := machine.warning():
        print(f"WARNING: {warning}", file=sys.stderr)
    reports = []
    names = tuple(filter(None, chosen.operations.split(",")))
    for ranks in map(int, chosen.ranks.split(",")):
        args = (names, chosen.rounds, chosen.steps)
        seconds = run_job(time_calls, ranks, *args, deadline_s=chosen.deadline_s)
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
    elapsed: dict[str, dict[str, float]]
    worked: dict[str, dict[str, float]]

    @classmethod
    def of(cls, by_rank: list[Seconds]) -> Report:
        """Return the report on what the ranks have measured."""
        elapsed, worked = (
            {
                name: {
                    way: 1e6 * min(slowest_rank([[t[kind] for t in r[name][way]] for r in by_rank]))
                    for way in NAMES
                }
                for name in by_rank[0]
            }
            for kind in (0, 1)
        )
        return cls(len(by_rank), elapsed, worked)

    def added(self, name: str, way: str) -> float:
        """Return by how many microseconds a rank works longer for a call of ours."""
        return self.worked[name][way] - self.worked[name][NAMES[0]]

    def format(self) -> str:
        """Return the table of all operations, and below it the target."""
        head = ["operation", *(f"{way} us" for way in NAMES), *(f"{way} work" for way in NAMES)]
        head += [f"{way} adds" for way in NAMES[1:]]
        rows = [
            [
                name,
                *(f"{times[way]:.1f}" for way in NAMES),
                *(f"{self.worked[name][way]:.1f}" for way in NAMES),
                *(f"{self.added(name, way):+.1f}" for way in NAMES[1:]),
            ]
            for name, times in self.elapsed.items()
        ]
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return "\n".join([ranks, format_table(head, rows), *self.verdicts(), ""])

    def verdicts(self) -> list[str]:
        """Return one line a contestant: the target met, or missed by what."""
        lines = []
        for way in NAMES[1:]:
            worst = max(self.worked, key=lambda name: self.added(name, way))
            most = self.added(worst, way)
            verdict = "met" if most <= TARGET_US else "MISSED"
            lines.append(
                f"{way}: {most:+.1f} us of work a call at most, in {worst} (at most "
                f"{TARGET_US:+.0f}): {verdict}"
            )
        return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
