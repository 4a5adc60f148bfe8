"""Turns what the ranks saw into a table, or into plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from tools.bench.data_parallel.check import Agreement
from tools.bench.data_parallel.gpt import BATCHES
from tools.bench.data_parallel.measure import Outcome, Plan
from tools.bench.data_parallel.targets import REFERENCES, TARGETS
from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table

FEWEST_ROUNDS = 5
"""With fewer rounds a median says too little to call a target met."""

Times = Mapping[str, Sequence[float]]


@attrs.frozen
class Verdict:
    """A ratio next to its target."""

    contestant: str
    reference: str
    ratio: Spread
    at_most: float

    @property
    def is_met(self) -> bool:
        """Whether the median is small enough."""
        return self.ratio.median <= self.at_most


@attrs.frozen
class Report:
    """A timed run of all ranks.

    Args:
        plan: what was asked for.
        agreements: the worst of all ranks.
        missing: contestants that are not available, and why.
        times: by kind of batch and contestant, seconds a step of the slowest rank in each round.
    """

    plan: Plan
    agreements: dict[str, Agreement]
    missing: dict[str, str]
    times: dict[str, dict[str, list[float]]]

    @classmethod
    def of(cls, plan: Plan, outcomes: Sequence[Outcome]) -> Report:
        """Join what the ranks saw."""
        first = outcomes[0]
        agreements = {
            name: max((o.agreements[name] for o in outcomes), key=lambda found: found.error)
            for name in first.agreements
        }
        times = {
            kind: {name: slowest_rank([o.seconds[kind][name] for o in outcomes]) for name in names}
            for kind, names in first.seconds.items()
        }
        return cls(plan, agreements, first.missing, times)

    @property
    def agrees(self) -> bool:
        """Whether all contestants trained the same model."""
        return all(agreement.holds for agreement in self.agreements.values())

    def verdicts(self, kind: str) -> Iterator[Verdict]:
        """Yield the targets at one kind of batch whose contestants ran."""
        times = self.times[kind]
        for target in TARGETS[self.plan.comm]:
            if kind in target.at_most and {target.contestant, target.reference} <= times.keys():
                ratio = ratios(times[target.contestant], times[target.reference])
                yield Verdict(target.contestant, target.reference, ratio, target.at_most[kind])

    def format(self) -> str:
        """Return all of it as text."""
        parts = [self._format_agreements()]
        parts += [f"not available: {name}: {why}" for name, why in self.missing.items()]
        for kind in self.times:
            parts += [
                "",
                self._title(kind),
                self._format_times(kind),
                "",
                self._format_targets(kind),
            ]
        return "\n".join(parts)

    def as_data(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "plan": attrs.asdict(self.plan),
            "agreements": {name: attrs.asdict(found) for name, found in self.agreements.items()},
            "agrees": self.agrees,
            "missing": self.missing,
            "seconds": self.times,
            "targets": {
                kind: [{**attrs.asdict(v), "met": v.is_met} for v in self.verdicts(kind)]
                for kind in self.times
            },
        }

    def _format_agreements(self) -> str:
        if not self.agreements:
            return "no contestant whose weights could be compared"
        lines = [
            f"  {name}: {found.error:.1e}{'' if found.holds else '  DIFFERS'}"
            for name, found in self.agreements.items()
        ]
        moved = max(found.moved for found in self.agreements.values())
        head = (
            "largest difference of a weight from one process after 3 SGD steps, the last clipped "
            f"(largest change {moved:.1e}):"
        )
        return "\n".join([head, *lines])

    def _title(self, kind: str) -> str:
        batch = BATCHES[kind]
        return (
            f"{kind}: {batch.sequences} x {batch.length} tokens a rank, {self.plan.rounds} rounds "
            f"of {self.plan.steps[kind]} steps; median [smallest..largest]"
        )

    def _format_times(self, kind: str) -> str:
        times = self.times[kind]
        shown = [name for name in REFERENCES if name in times]
        rows = []
        for name, seconds in times.items():
            milliseconds = Spread.of([1e3 * second for second in seconds])
            against = [ratios(seconds, times[other]).format() for other in shown]
            rows.append([name, milliseconds.format(0), *against])
        return format_table(["", "ms a step", *(f"/ {name}" for name in shown)], rows)

    def _format_targets(self, kind: str) -> str:
        rows = []
        for verdict in self.verdicts(kind):
            said = "met" if verdict.is_met else "MISSED"
            if self.plan.rounds < FEWEST_ROUNDS:
                said = f"({said}: fewer than {FEWEST_ROUNDS} rounds)"
            name = f"{verdict.contestant} / {verdict.reference}"
            rows.append([name, verdict.ratio.format(), f"<= {verdict.at_most:.2f}", said])
        if not rows:
            return "no target among these contestants"
        return format_table(["ratio", "median [smallest..largest]", "target", ""], rows)
