"""What no schedule can undercut."""

from __future__ import annotations

import itertools
import math

from trainwright.pipeline_schedules.search.problem import Problem


def lower_bound(problem: Problem) -> float:
    """A value that no order of the actions can be below.

    The largest of: the way of one microbatch through all stages and back; for each rank what
    comes before its first action, its work, and the time in which it must wait because memory
    allows neither more F before the first I nor more open gradients after the last F; the work
    without W and what comes after it; and the memory that its microbatches hold for as long as
    they are away, over its limit.
    """
    way = _Way(problem)
    bounds = [way.one_microbatch()]
    for rank, work in enumerate(problem.work()):
        stages = problem.stages_of(rank)
        head = min(way.forward_before[stage] for stage in stages)
        start = head if problem.objective == "makespan" else 0.0
        bounds.append(start + work + way.forced_waits(rank, stages))
        bounds.append(start + way.held_too_long(rank, stages))
        if problem.objective == "makespan":
            bounds.append(start + way.last_gradient(stages))
    return max(bounds)


class _Way:
    """Times along the way of one microbatch."""

    def __init__(self, problem: Problem) -> None:
        forward, backward, _ = problem.costs
        hops = problem.hops
        self.problem = problem
        self.forward_before = [0.0, *itertools.accumulate(_with(forward[:-1], hops))]
        self.backward_below = [0.0, *itertools.accumulate(_with(backward[:-1], hops))]
        # From the start of F until I can start, by stage, from the last one down.
        away = forward[-1]
        self.away = [away]
        for stage in range(len(forward) - 2, -1, -1):
            away = forward[stage] + hops[stage] + away + backward[stage + 1] + hops[stage]
            self.away.insert(0, away)

    def one_microbatch(self) -> float:
        """Forwards, backwards and the last weight gradient; of one rank, the part since its F."""
        _, backward, weight = self.problem.costs
        # Of the first stage, whose F comes first of all: span and makespan are the same here.
        return self.away[0] + backward[0] + weight[0]

    def last_gradient(self, stages: list[int]) -> float:
        """All F and I of a rank, and the way of the last I down to the first stage."""
        forward, backward, weight = self.problem.costs
        work = sum(forward[stage] + backward[stage] for stage in stages)
        below = min(self.backward_below[stage] for stage in stages)
        return self.problem.microbatches * work + below + weight[0]

    def forced_waits(self, rank: int, stages: list[int]) -> float:
        """Waits before the first I, and on a rank with one stage after the last F."""
        problem = self.problem
        number, limit = problem.microbatches, problem.limits[rank] * (1 + 1e-9)
        forward = problem.costs[0]
        if len(stages) > 1:
            # From the first F of the first stage until the I of the last one can start.
            first, last = stages[0], stages[-1]
            until = self.forward_before[last] - self.forward_before[first] + self.away[last]
            fastest = max(_ratio(forward[s], problem.hold_forward[s]) for s in stages)
            most = number * sum(forward[stage] for stage in stages)
            if math.isfinite(fastest) and math.isfinite(limit):
                most = min(most, fastest * limit)
            return max(0.0, until - most)
        stage = stages[0]
        ahead = min(float(number), _floor(_ratio(limit, problem.hold_forward[stage])))
        before = max(0.0, self.away[stage] - ahead * forward[stage])
        after = max(0.0, self.away[stage] - forward[stage] - self._open_work(stage, limit))
        # With all F before the first I, both waits may be one.
        return before + after if ahead < number else max(before, after)

    def _open_work(self, stage: int, limit: float) -> float:
        """The most that a rank can have left to do, but for its last F, beside that F."""
        problem = self.problem
        _, backward, weight = problem.costs
        gradients = backward[stage] + weight[stage]
        others = (problem.microbatches - 1) * gradients
        room = limit - problem.hold_forward[stage]
        fastest = max(
            _ratio(gradients, problem.hold_forward[stage]),
            _ratio(weight[stage], problem.hold_weight[stage]),
        )
        if math.isfinite(fastest) and math.isfinite(room):
            return min(others, fastest * room)
        return others

    def held_too_long(self, rank: int, stages: list[int]) -> float:
        """Memory times time that all microbatches need, over the memory there is."""
        problem = self.problem
        if problem.limits[rank] == math.inf:
            return 0.0
        area = sum(problem.hold_forward[stage] * self.away[stage] for stage in stages)
        if area == 0:
            return 0.0
        return problem.microbatches * area / (problem.limits[rank] * (1 + 1e-9))


def _with(costs: list[float], hops: list[float]) -> list[float]:
    return [cost + hop for cost, hop in zip(costs, hops, strict=True)]


def _ratio(one: float, other: float) -> float:
    if other == 0:
        return math.inf if one > 0 else 0.0
    return one / other


def _floor(value: float) -> float:
    return math.floor(value) if math.isfinite(value) else value
