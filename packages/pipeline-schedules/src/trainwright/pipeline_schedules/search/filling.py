"""Where weight gradients go, once forwards and input gradients stand in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import attrs

from trainwright.pipeline_schedules.search.problem import Orders, Problem

ROUNDING = 1e-9
"""What sums of fractions may exceed a limit by, relative to it."""


@attrs.frozen(eq=False)
class Filled:
    """A complete order and when it ends.

    Attributes:
        value: The objective.
        orders: The operations of each rank.
        loads: For each rank its work and the time it waits, from its first start (span) or from
            the beginning (makespan) on.
    """

    value: float
    orders: Orders
    loads: list[float]


def fill(problem: Problem, backbone: Orders, floors: Sequence[float]) -> Filled | None:
    """Run the F and I of a backbone in order and put a W wherever it helps.

    A W goes where memory is needed, and into every wait that it fits into. A shorter wait is
    filled too, which delays what comes, unless the rank can afford to wait: as long as its load
    stays below its floor or below the largest load so far, waiting makes nothing later. This is
    the tolerance of the zero-bubble paper's heuristic, for unequal loads.

    Args:
        problem: What things cost.
        backbone: F and I of each rank.
        floors: Loads that each rank may reach in any case; 0 for the tolerance alone.

    Returns:
        None where memory does not suffice or ranks wait for each other in a circle.
    """
    work = problem.work()
    # The last place stands for what is always there.
    run = _Run(problem, [math.inf] * (2 * problem.cells) + [0.0], max(work))
    ranks = [_Rank(problem, r, work[r], floors[r], order) for r, order in enumerate(backbone)]
    going = [rank for rank in ranks if rank.order]
    # Up for forwards and down for backwards: neighbours see what stands before them at once.
    while going:
        moved = [rank.step(run) for rank in (*going, *reversed(going))]
        if None in moved or not any(moved):
            return None
        going = [rank for rank in going if rank.place < len(rank.order)]
    value = max(rank.finish() for rank in ranks)
    return Filled(value, [rank.done for rank in ranks], [rank.load for rank in ranks])


@attrs.define(eq=False)
class _Run:
    """Ends of F and I so far, and the largest load so far."""

    problem: Problem
    ends: list[float]
    largest: float


class _Rank:
    """One rank on its way through its order."""

    def __init__(
        self, problem: Problem, rank: int, work: float, floor: float, order: list[int]
    ) -> None:
        self.problem = problem
        self.order = order
        self.floor = floor
        self.load = work
        self.place = 0
        self.done: list[int] = []
        self.pending: deque[int] = deque()
        self.now = 0.0
        self.first_start: float | None = None
        self.held = 0.0
        self.limit = problem.limits[rank] * (1.0 + ROUNDING)

    def step(self, run: _Run) -> bool | None:
        """Run the next F or I, if what it needs is there; None where memory does not suffice."""
        if self.place == len(self.order):
            return False
        number = self.order[self.place]
        table = self.problem.table
        arrival = run.ends[table.needs[number]] + table.delay[number]
        if arrival == math.inf:
            return False
        change = table.change[number]
        while self.held + change > self.limit:
            if not self.pending:
                return None
            self._weight_gradient()
        if self.now < arrival or self.first_start is None:
            self._wait(arrival, run)
        self.held += change
        self.now += table.cost[number]
        run.ends[number] = self.now
        self.done.append(number)
        if number >= self.problem.cells and not self.problem.whole:
            self.pending.append(number - self.problem.cells)
        self.place += 1
        return True

    def _wait(self, arrival: float, run: _Run) -> None:
        """Let time pass until ``arrival``, with W where that is better than waiting."""
        costs, microbatches = self.problem.costs[2], self.problem.microbatches
        if self.first_start is None:
            self.first_start = arrival if self.problem.objective == "span" else 0.0
            self.now = self.first_start
        while self.pending and self.now < arrival:
            late = self.now + costs[self.pending[0] // microbatches] > arrival
            if late and arrival - self.now <= max(run.largest, self.floor) - self.load:
                break
            self._weight_gradient()
        if self.now < arrival:
            self.load += arrival - self.now
            self.now = arrival
            run.largest = max(run.largest, self.load)

    def _weight_gradient(self) -> None:
        problem = self.problem
        cell = self.pending.popleft()
        stage = cell // problem.microbatches
        self.now += problem.costs[2][stage]
        self.held -= problem.hold_weight[stage]
        self.done.append(2 * problem.cells + cell)

    def finish(self) -> float:
        """Run the remaining W; the time from the first start to the end."""
        while self.pending:
            self._weight_gradient()
        return self.now - (self.first_start or 0.0)
