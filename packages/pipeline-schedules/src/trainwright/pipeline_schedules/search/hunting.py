"""How a search spends its budget: many backbones, better fillings of the best, small changes."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import attrs

from trainwright.pipeline_schedules.costs import Costs
from trainwright.pipeline_schedules.generators import GENERATORS
from trainwright.pipeline_schedules.memory import Memory, peak_memory
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.search.filling import ROUNDING, Filled, fill
from trainwright.pipeline_schedules.search.improving import improved
from trainwright.pipeline_schedules.search.listing import drawn_up
from trainwright.pipeline_schedules.search.problem import Orders, Problem
from trainwright.pipeline_schedules.search.warmups import Ahead, families, most_ahead
from trainwright.pipeline_schedules.simulate import simulate

_KEPT = 6
_ROUNDS = 3000
_TARGETS = (0.7, 0.85, 0.95)
_SMALL = 4000
"""Operations up to which single ones are moved: beyond, one change in thousands hardly counts."""


@attrs.define(eq=False)
class _Sketch:
    """A backbone, what it was made of, and how it fills."""

    backbone: Orders
    ahead: Ahead | None
    filled: Filled


class Hunt:
    """The best schedule so far, and what may still be spent.

    Args:
        costs: What actions cost.
        memory: What stages hold.
        budget: How many operations may still be placed.
    """

    def __init__(self, costs: Costs, memory: Memory, budget: int) -> None:
        self.costs = costs
        self.memory = memory
        self.budget = budget
        self.best: Schedule | None = None
        self.value = math.inf
        self.enough = 0.0
        self.patterns: list[Schedule] = []

    def take_generators(self, problem: Problem) -> None:
        """Measure what the generators make for this placement, and keep it as patterns."""
        stages, ranks = len(problem.owner), problem.ranks
        if stages % ranks:
            return
        for generator in GENERATORS.values():
            if generator.chunks not in (None, stages // ranks):
                continue
            made = generator.make(ranks, problem.microbatches, stages // ranks)
            if made.rank_of_stage == problem.owner and not made.forward_only:
                self.patterns.append(made)
                self.take(problem, made)

    def take(self, problem: Problem, schedule: Schedule) -> None:
        """Keep a schedule that is better than the best one and within the limits."""
        held = peak_memory(schedule, self.memory)
        limits = (limit * (1 + ROUNDING) for limit in problem.limits)
        if any(peak > limit for peak, limit in zip(held, limits, strict=True)):
            return
        run = simulate(schedule, self.costs)
        value = run.makespan if problem.objective == "makespan" else run.span
        if value < self.value:
            self.best, self.value = schedule, value

    def over(self, problem: Problem) -> None:
        """Search one problem, and keep what is better."""
        sketches: list[_Sketch] = []
        for ahead, backbone in self._backbones(problem):
            if self._done(problem):
                break
            filled = self._fill(problem, backbone, [0.0] * problem.ranks)
            if filled is not None:
                sketches.append(_Sketch(backbone, ahead, filled))
        kept = heapq.nsmallest(_KEPT, sketches, key=lambda sketch: sketch.filled.value)
        for place, sketch in enumerate(kept):
            self._refill(problem, sketch)
            if place < 2 and sketch.ahead is not None:
                self._climb(problem, sketch)
        kept.sort(key=lambda sketch: sketch.filled.value)
        for place, sketch in enumerate(kept):
            if place < 2:
                self._improve(problem, sketch)
            self.take(problem, problem.schedule(sketch.filled.orders, "searched"))

    def _backbones(self, problem: Problem) -> Iterator[tuple[Ahead | None, Orders]]:
        for pattern in self.patterns:
            yield None, problem.backbone(pattern)
        if len(problem.owner) == problem.ranks and list(problem.owner) == sorted(problem.owner):
            for ahead in families(problem):
                yield ahead, ahead.backbone(problem)
        for orders in drawn_up(problem):
            self.budget -= 2 * problem.size
            if orders is not None:
                yield None, orders

    def _fill(self, problem: Problem, backbone: Orders, floors: list[float]) -> Filled | None:
        self.budget -= problem.size
        filled = fill(problem, backbone, floors)
        if filled is not None and filled.value <= self.enough:
            self.take(problem, problem.schedule(filled.orders, "searched"))
        return filled

    def _done(self, problem: Problem) -> bool:
        return self.budget < problem.size or self.value <= self.enough

    def _refill(self, problem: Problem, sketch: _Sketch) -> None:
        """Try other tolerances: up to a target, or what ranks could afford the last time."""
        work = problem.work()
        top, loads = max(sketch.filled.loads), sketch.filled.loads
        tries = [[own + top - load for own, load in zip(work, loads, strict=True)]]
        tries += [[max(work) + part * (top - max(work))] * problem.ranks for part in _TARGETS]
        for floors in tries:
            if self._done(problem):
                return
            filled = self._fill(problem, sketch.backbone, floors)
            if filled is not None and filled.value < sketch.filled.value:
                sketch.filled = filled

    def _climb(self, problem: Problem, sketch: _Sketch) -> None:
        """Change the numbers ahead one by one, as long as that helps."""
        most = most_ahead(problem)
        spare = self.budget // 2
        while sketch.ahead is not None:
            before = sketch.filled.value
            for ahead in sketch.ahead.neighbours(most):
                if self._done(problem) or self.budget < spare:
                    return
                backbone = ahead.backbone(problem)
                filled = self._fill(problem, backbone, [0.0] * problem.ranks)
                if filled is not None and filled.value < sketch.filled.value:
                    sketch.backbone, sketch.ahead, sketch.filled = backbone, ahead, filled
            if sketch.filled.value >= before:
                return

    def _improve(self, problem: Problem, sketch: _Sketch) -> None:
        if problem.size > _SMALL or self._done(problem):
            return
        rounds = min(_ROUNDS, self.budget // problem.size)
        self.budget -= rounds * problem.size // 2
        value, orders = improved(problem, sketch.filled.orders, rounds, self.enough)
        sketch.filled = Filled(value, orders, sketch.filled.loads)
