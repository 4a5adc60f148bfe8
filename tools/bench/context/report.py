"""Turns what the ranks saw into a table, or into plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tools.bench.context.contestants import SHAPES
from tools.bench.context.race import TOLERANCE, Outcome, Plan
from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table

FEWEST_ROUNDS = 5
"""With fewer rounds a median says too little to call a target met."""

MOST_TIME = 1.15
"""Of half (a rank's share) of one process's attention and the exchange alone."""

MOST_MEMORY = 0.6
"""Of what one process holds."""


@attrs.frozen
class Report:
    """A timed run of all ranks.

    Args:
        plan: What was asked for.
        ranks: How many there were.
        errors: The worst of all ranks.
        held: The most that a rank held in a step, in bytes.
        times: Seconds a step of the slowest rank in each round.
    """

    plan: Plan
    ranks: int
    errors: dict[str, float]
    held: dict[str, int]
    times: dict[str, list[float]]

    @classmethod
    def of(cls, plan: Plan, outcomes: Sequence[Outcome]) -> Report:
        """Join what the ranks saw."""
        first = outcomes[0]
        errors = {name: max(o.errors[name] for o in outcomes) for name in first.errors}
        # A rank that found a difference has timed nothing.
        timed = first.seconds if all(o.agrees for o in outcomes) else {}
        held = {name: max(o.held[name] for o in outcomes) for name in timed}
        times = {name: slowest_rank([o.seconds[name] for o in outcomes]) for name in timed}
        return cls(plan, len(outcomes), errors, held, times)

    @property
    def agrees(self) -> bool:
        """Whether all contestants compute the same."""
        return all(error <= TOLERANCE for error in self.errors.values())

    def floor(self) -> list[float]:
        """Return for each round a rank's share of one process's time, and the exchange alone."""
        pairs = zip(self.times["single"], self.times["exchange"], strict=True)
        return [single / self.ranks + exchange for single, exchange in pairs]

    def verdicts(self) -> Iterator[tuple[str, Spread, float]]:
        """Yield the ratios that have a target, and the target."""
        if {"ring", "single", "exchange"} <= self.times.keys():
            found = ratios(self.times["ring"], self.floor())
            yield "time: ring / (single / ranks + exchange)", found, MOST_TIME
        if {"ring", "single"} <= self.times.keys():
            held = Spread.of([self.held["ring"] / self.held["single"]])
            yield "memory: ring / single", held, MOST_MEMORY

    def format(self) -> str:
        """Return all of it as text."""
        lines = [f"largest relative difference of a result from one process (<= {TOLERANCE}):"]
        lines += [
            f"  {name}: {error:.1e}{'' if error <= TOLERANCE else '  DIFFERS'}"
            for name, error in self.errors.items()
        ]
        if self.times:
            title = (
                f"causal attention forward and backward, {SHAPES[self.plan.size]}, "
                f"{self.plan.rounds} rounds of {self.plan.steps} steps; median [smallest..largest]"
            )
            lines += ["", title, self._format_times(), "", self._format_targets()]
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            **attrs.asdict(self),
            "agrees": self.agrees,
            "targets": [
                {"ratio": name, **attrs.asdict(found), "at_most": at_most}
                for name, found, at_most in self.verdicts()
            ],
        }

    def _format_times(self) -> str:
        has_floor = {"single", "exchange"} <= self.times.keys()
        rows = []
        for name, seconds in self.times.items():
            milliseconds = Spread.of([1e3 * second for second in seconds])
            against = [ratios(seconds, self.floor()).format()] if has_floor else []
            rows.append([name, milliseconds.format(1), f"{self.held[name] / 2**20:.1f}", *against])
        floor = ["/ (single / ranks + exchange)"] if has_floor else []
        return format_table(["", "ms a step", "MiB held", *floor], rows)

    def _format_targets(self) -> str:
        rows = []
        for name, found, at_most in self.verdicts():
            said = "met" if found.median <= at_most else "MISSED"
            if self.plan.rounds < FEWEST_ROUNDS and name.startswith("time"):
                said = f"({said}: fewer than {FEWEST_ROUNDS} rounds)"
            rows.append([name, found.format(3), f"<= {at_most:.2f}", said])
        if not rows:
            return "no target among these contestants"
        return format_table(["ratio", "median [smallest..largest]", "target", ""], rows)
