"""Turns what the ranks saw into a table, or into plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from tools.bench.rounds import Spread, ratios, slowest_rank
from tools.bench.table import format_table
from tools.bench.tensor_parallel import heads
from tools.bench.tensor_parallel.block import SHAPES
from tools.bench.tensor_parallel.race import TOLERANCE, Outcome, Plan

FEWEST_ROUNDS = 5
"""With fewer rounds a median says too little to call a target met."""

TARGETS = {
    "block": (("ours", "torch", 1.0), ("ours_sequence", "torch_sequence", 1.0)),
    "cross-entropy": (("chunked", "unchunked", 1.1), ("unchunked", "loss_parallel", 1.0)),
}
"""Whose step takes at most how many times whose."""

MOST_LOGITS = ("chunked", 1 / 8)
"""Who holds at most what part of a rank's logits at once."""

REFERENCES = {
    "block": ("single", "torch", "torch_sequence"),
    "cross-entropy": ("loss_parallel", "unchunked"),
}
"""Everybody's step is shown as a multiple of these."""


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

    def verdicts(self) -> Iterator[tuple[str, Spread, float]]:
        """Yield the ratios that have a target, and the target."""
        for name, other, at_most in TARGETS[self.plan.kind]:
            if {name, other} <= self.times.keys():
                found = ratios(self.times[name], self.times[other])
                yield f"{name} / {other}", found, at_most

    def logits_held(self, name: str) -> float:
        """Return what a contestant holds beside gradients, as a part of a rank's logits."""
        shape = heads.SHAPES[self.plan.size]
        gradients = 4 * shape.width * (shape.vocabulary // self.ranks + shape.tokens)
        return (self.held[name] - gradients) / shape.logits_bytes(self.ranks)

    def format(self) -> str:
        """Return all of it as text."""
        lines = [f"largest relative difference of a result from one process (<= {TOLERANCE}):"]
        lines += [
            f"  {name}: {error:.1e}{'' if error <= TOLERANCE else '  DIFFERS'}"
            for name, error in self.errors.items()
        ]
        if self.times:
            lines += ["", self._title(), self._format_times(), "", self._format_targets()]
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

    def _title(self) -> str:
        shape = SHAPES if self.plan.kind == "block" else heads.SHAPES
        return (
            f"{self.plan.kind}, {shape[self.plan.size]}, {self.plan.rounds} rounds of "
            f"{self.plan.steps} steps; median [smallest..largest]"
        )

    def _format_times(self) -> str:
        shown = [name for name in REFERENCES[self.plan.kind] if name in self.times]
        is_head = self.plan.kind == "cross-entropy"
        rows = []
        for name, seconds in self.times.items():
            milliseconds = Spread.of([1e3 * second for second in seconds])
            held = f"{self.held[name] / 2**20:.1f}"
            logits = [f"{self.logits_held(name):.3f}"] if is_head else []
            against = [ratios(seconds, self.times[other]).format() for other in shown]
            rows.append([name, milliseconds.format(1), held, *logits, *against])
        logits = ["of logits"] if is_head else []
        head = ["", "ms a step", "MiB held", *logits, *(f"/ {name}" for name in shown)]
        return format_table(head, rows)

    def _format_targets(self) -> str:
        rows = []
        for name, found, at_most in self.verdicts():
            said = "met" if found.median <= at_most else "MISSED"
            if self.plan.rounds < FEWEST_ROUNDS:
                said = f"({said}: fewer than {FEWEST_ROUNDS} rounds)"
            rows.append([name, found.format(), f"<= {at_most:.2f}", said])
        name, most = MOST_LOGITS
        if self.plan.kind == "cross-entropy" and name in self.held:
            part = self.logits_held(name)
            said = "met" if part <= most else "MISSED"
            rows.append([f"{name}: of logits", f"{part:.3f}", f"<= {most:.3f}", said])
        if not rows:
            return "no target among these contestants"
        return format_table(["ratio", "median [smallest..largest]", "target", ""], rows)
