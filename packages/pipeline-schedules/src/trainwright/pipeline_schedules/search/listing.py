"""Backbones for any placement: whoever is free takes what matters most, as time goes by."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

import attrs

from trainwright.pipeline_schedules.search.filling import ROUNDING
from trainwright.pipeline_schedules.search.problem import Orders, Problem

_SLOPES = (1.5, 2.0, 1.25, 1.0, 2.5)
_PHASES = (0.0, 0.99)


@attrs.frozen
class Habits:
    """How ranks choose; searching tries several.

    Attributes:
        alternate: After an I an F comes first, if one is there; otherwise always an I.
        deep: Of several stages the last one's F first; otherwise the first one's.
        patience: The part of a W by which it may delay what is known to come.
        patience_forward: The part of an F by which it may delay an I that is known to come.
        floor: The load up to which a rank may wait in any case.
        ahead: At most so many microbatches of a stage between F and I; None for what memory allows.
    """

    alternate: bool = True
    deep: bool = True
    patience: float = 1.0
    patience_forward: float = 0.5
    floor: float = 0.0
    ahead: tuple[int, ...] | None = None


def listed(problem: Problem, habits: Habits) -> Orders | None:
    """Let every rank that is free choose, in the order of time, by these habits.

    A rank takes an I that is there, or an F that memory allows; where neither is there, a W, if
    it does not delay what is known to come, or if the rank cannot afford to wait. Memory for the
    later stages of the oldest microbatch is kept back, so that it can always go on.

    Returns:
        F and I of each rank; None where memory does not suffice.
    """
    run = _Listing(problem, habits)
    while run.heap:
        now, rank = heapq.heappop(run.heap)
        if run.free[-rank] <= now:
            run.choose(now, -rank)
    if run.left:
        return None
    return run.orders


def drawn_up(problem: Problem) -> Iterator[Orders | None]:
    """Backbones by several habits.

    Ranks choose once as if W took no time, which keeps F and I in an even rhythm, once as if it
    took half of its time, and once with all of it.
    """
    for part in (1.0, 0.0, 0.5):
        seen = _with_shorter_weights(problem, part)
        for slope, phase in ((0.0, 0.0), *itertools.product(_SLOPES, _PHASES)):
            ahead = _ahead(problem, slope, phase) if slope else None
            for alternate, patience in ((False, 0.5), (True, 0.5), (True, 1.0), (True, 0.0)):
                yield listed(seen, Habits(alternate, True, 0.5, patience, 0.0, ahead))
        yield listed(seen, Habits(deep=False))


def _with_shorter_weights(problem: Problem, part: float) -> Problem:
    forward, backward, weight = problem.costs
    return attrs.evolve(
        problem,
        costs=(forward, backward, [part * cost for cost in weight]),
        hold_weight=problem.hold_weight if part else [0.0] * len(weight),
    )


def _ahead(problem: Problem, slope: float, phase: float) -> tuple[int, ...]:
    """Microbatches between F and I, from how long they are away in a steady rhythm."""
    forward, backward, _ = problem.costs
    rhythm = max(problem.work()) / problem.microbatches
    away = 0.0
    numbers = []
    for stage in reversed(range(len(forward))):
        number = 1 + math.floor(slope * away / rhythm + phase)
        numbers.append(min(problem.microbatches, number))
        if stage:
            away += forward[stage] + backward[stage] + 2 * problem.hops[stage - 1]
    return tuple(reversed(numbers))


class _Listing:
    """What has happened so far."""

    def __init__(self, problem: Problem, habits: Habits) -> None:
        stages, ranks, number = len(problem.owner), problem.ranks, problem.microbatches
        self.problem = problem
        self.habits = habits
        self.local = [problem.stages_of(rank) for rank in range(ranks)]
        self.arrivals: tuple[list[list[float]], list[list[float]]] = (
            [[] for _ in range(stages)],
            [[] for _ in range(stages)],
        )
        self.arrivals[0][0] = [0.0] * number
        self.done = ([0] * stages, [0] * stages, [0] * stages)
        self.free = [0.0] * ranks
        self.held = [0.0] * ranks
        self.in_flight = [0.0] * ranks
        self.loads = problem.work()
        self.largest = max(self.loads)
        self.idle_since = [math.inf if problem.objective == "span" else 0.0] * ranks
        self.after_backward = [False] * ranks
        self.limits = [limit * (1.0 + ROUNDING) for limit in problem.limits]
        self.orders: Orders = [[] for _ in range(ranks)]
        self.left = 2 * problem.cells
        # Later ranks first, so that the others know which I is coming.
        self.heap = [(0.0, -rank) for rank in range(ranks - 1, -1, -1)]

    def choose(self, now: float, rank: int) -> None:
        """Start something on this rank, or wait for what is known to come."""
        backward, backward_at = self._first(1, now, rank)
        forward, forward_at = self._first(0, now, rank)
        pending = next((s for s in self.local[rank] if self._pending(s)), None)
        next_at = min(backward_at, forward_at)
        if backward_at <= now and not (forward_at <= now and self._turn_of_forward(rank, forward)):
            if self._fits(rank, 1, backward):
                return self._start(1, backward, now, rank)
        elif forward_at <= now:
            if self._fits(rank, 0, forward):
                if not self._rather_awaits(now, rank, forward, backward_at):
                    return self._start(0, forward, now, rank)
                next_at = backward_at
                if pending is not None and now + self.problem.costs[2][pending] > next_at:
                    pending = None
        elif pending is not None and self._rather_waits(now, rank, pending, next_at):
            pending = None
        if pending is not None:
            return self._start(2, pending, now, rank)
        if now < next_at < math.inf:
            heapq.heappush(self.heap, (next_at, -rank))
        return None

    def _pending(self, stage: int) -> bool:
        return not self.problem.whole and self.done[2][stage] < self.done[1][stage]

    def _first(self, kind: int, now: float, rank: int) -> tuple[int, float]:
        """The stage whose F or I comes first here, of those that are there the preferred one."""
        arrivals, done = self.arrivals[kind], self.done[kind]
        best, best_at = -1, math.inf
        deepest_first = kind == 1 or self.habits.deep
        for stage in reversed(self.local[rank]) if deepest_first else self.local[rank]:
            number = done[stage]
            if number >= len(arrivals[stage]) or (kind == 0 and not self._allowed(rank, stage)):
                continue
            if arrivals[stage][number] <= now:
                return stage, now
            if arrivals[stage][number] < best_at:
                best, best_at = stage, arrivals[stage][number]
        return best, best_at

    def _allowed(self, rank: int, stage: int) -> bool:
        """Whether an F fits once all W are done, with room for the oldest microbatch."""
        forwards = self.done[0]
        ahead = self.habits.ahead
        if ahead is not None and forwards[stage] - self.done[1][stage] >= ahead[stage]:
            return False
        hold = self.problem.hold_forward
        needed = self.in_flight[rank] + hold[stage]
        if len(self.local[rank]) > 1:
            oldest = min(forwards[other] for other in self.local[rank])
            needed += sum(
                hold[other]
                for other in self.local[rank]
                if forwards[other] == oldest and not (other == stage and forwards[stage] == oldest)
            )
        return needed <= self.limits[rank]

    def _fits(self, rank: int, kind: int, stage: int) -> bool:
        change = self.problem.table.change[
            kind * self.problem.cells + stage * self.problem.microbatches
        ]
        return self.held[rank] + change <= self.limits[rank]

    def _turn_of_forward(self, rank: int, stage: int) -> bool:
        return self.habits.alternate and self.after_backward[rank] and self._fits(rank, 0, stage)

    def _rather_awaits(self, now: float, rank: int, forward: int, backward_at: float) -> bool:
        """Whether to wait for an I that comes before this F would end."""
        if backward_at == math.inf or backward_at <= now:
            return False
        cost = self.problem.costs[0][forward]
        late = now + cost - backward_at
        return late > self.habits.patience_forward * cost and self._affords(rank, backward_at - now)

    def _rather_waits(self, now: float, rank: int, pending: int, next_at: float) -> bool:
        """Whether to wait for what comes before this W would end."""
        cost = self.problem.costs[2][pending]
        late = now + cost - next_at
        if late <= 0:
            return False
        return late > self.habits.patience * cost or self._affords(rank, next_at - now)

    def _affords(self, rank: int, wait: float) -> bool:
        return self.loads[rank] + wait <= max(self.largest, self.habits.floor)

    def _start(self, kind: int, stage: int, now: float, rank: int) -> None:
        problem = self.problem
        number = self.done[kind][stage]
        self.done[kind][stage] += 1
        if now > self.idle_since[rank]:
            self.loads[rank] += now - self.idle_since[rank]
            self.largest = max(self.largest, self.loads[rank])
        end = now + problem.costs[kind][stage]
        self.free[rank] = self.idle_since[rank] = end
        heapq.heappush(self.heap, (end, -rank))
        if kind == 2:
            self.held[rank] -= problem.hold_weight[stage]
            return
        operation = kind * problem.cells + stage * problem.microbatches + number
        self.orders[rank].append(operation)
        self.left -= 1
        self.held[rank] += problem.table.change[operation]
        hold = problem.hold_forward[stage]
        self.in_flight[rank] += -hold if kind else hold
        self.after_backward[rank] = kind == 1
        self._arrives(kind, stage, end)

    def _arrives(self, kind: int, stage: int, end: float) -> None:
        """Tell the next stage when it gets the result."""
        problem = self.problem
        last = len(problem.owner) - 1
        if kind == 0 and stage == last:
            self.arrivals[1][stage].append(end)
            return
        if kind == 1 and stage == 0:
            return
        target = stage - 1 if kind else stage + 1
        at = end + problem.hops[min(stage, target)]
        self.arrivals[kind][target].append(at)
        heapq.heappush(self.heap, (at, -problem.owner[target]))
