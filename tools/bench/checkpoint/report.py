"""The tables of a run, with the targets beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from tools.bench.checkpoint.race import Outcome, Plan
from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table

TARGETS = {"save": 1.1, "asynchronous": 0.3, "load": 1.3}
_TITLES = {
    "save": "save, synced, seconds",
    "asynchronous": "asynchronous save, seconds that it holds the step up, then in the background",
    "load": "load, seconds",
}


@attrs.frozen
class Report:
    """What all ranks saw.

    Args:
        plan: What was timed.
        outcomes: Of each rank.
    """

    plan: Plan
    outcomes: Sequence[Outcome]

    @property
    def agrees(self) -> bool:
        """Whether every load of every rank gave what was saved."""
        return all(all(outcome.agrees.values()) for outcome in self.outcomes)

    def seconds(self, kind: str) -> dict[str, list[float]]:
        """Return the seconds of the slowest rank by contestant, without the first round."""
        found = [outcome.seconds[kind] for outcome in self.outcomes]
        return {name: slowest_rank([rank[name] for rank in found])[1:] for name in found[0]}

    def format(self) -> str:
        """Return the tables."""
        first = self.outcomes[0]
        lines = [f"{first.num_bytes / 2**30:.2f} GiB in all, {self.plan.rounds} rounds"]
        for kind in self.plan.kinds:
            lines += ["", _TITLES[kind], self._table(kind)]
        if first.extra:
            lines += ["", *self._memory()]
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "bytes": self.outcomes[0].num_bytes,
            "agrees": self.agrees,
            "ranks": [attrs.asdict(outcome) for outcome in self.outcomes],
        }

    def _table(self, kind: str) -> str:
        seconds = self.seconds(kind)
        head = ["", "seconds", "ours / this", f"target {TARGETS[kind]}"]
        rows = []
        for name, times in seconds.items():
            row = [name, Spread.of(times).format(3), "", ""]
            if name != "ours":
                ratio = ratios(seconds["ours"], times)
                row[2:] = [ratio.format(), "met" if ratio.median <= TARGETS[kind] else "MISSED"]
            if kind == "asynchronous":
                behind = slowest_rank([outcome.behind[name] for outcome in self.outcomes])[1:]
                row.insert(2, Spread.of(behind).format())
            rows.append(row)
        if kind == "asynchronous":
            head.insert(2, "behind")
        return format_table(head, rows)

    def _memory(self) -> list[str]:
        largest = max(outcome.largest for outcome in self.outcomes)
        lines = [f"private memory that a load takes; the largest part is {largest / 2**20:.1f} MiB"]
        for name in self.outcomes[0].extra:
            extra = max(outcome.extra[name] for outcome in self.outcomes)
            verdict = ""
            if name == "ours":
                verdict = ": met" if extra <= largest else ": MISSED"
            lines.append(f"{name}: {extra / 2**20:.1f} MiB{verdict}")
        return lines
