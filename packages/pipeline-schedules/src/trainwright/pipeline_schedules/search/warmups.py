"""Backbones for one stage a rank: how many microbatches each rank runs ahead, and how long."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs

from trainwright.pipeline_schedules.search.problem import Orders, Problem

_PHASES = (0.0, 0.5, 0.99)
_SLOPES = (1.0, 2.0, 2.1, 2.2)
_STEPS = (None, 1, 2, 3, 5)


@attrs.frozen
class Ahead:
    """How many F stand before the next I, on each rank.

    Before its I number k a rank has run ``max(late, early - k // step) + k`` F: it starts with
    what fills the time until its first I, and then gives up one microbatch in ``step``, until as
    many are left as the steady phase needs. Where ``step`` is None, it starts with ``late``.

    Attributes:
        early: Of each rank, at the first I.
        late: Of each rank, in the steady phase.
        step: How fast the one becomes the other.
    """

    early: tuple[int, ...]
    late: tuple[int, ...]
    step: int | None

    def backbone(self, problem: Problem) -> Orders:
        """F and I of each rank in order."""
        last = problem.microbatches
        orders = []
        for rank, (early, late) in enumerate(zip(self.early, self.late, strict=True)):
            order: list[int] = []
            forwards = 0
            first_f = rank * last
            first_i = problem.cells + first_f
            for number in range(last):
                ahead = late if self.step is None else max(late, early - number // self.step)
                wanted = min(last, max(ahead, 1) + number)
                if wanted > forwards:
                    order += range(first_f + forwards, first_f + wanted)
                    forwards = wanted
                order.append(first_i + number)
            orders.append(order)
        return orders

    def neighbours(self, most: int) -> Iterator[Ahead]:
        """The same with one more or one less ahead on one rank, or on it and all on one side."""
        ranks = len(self.late)
        for change in (-1, 1):
            for rank in range(ranks):
                for chosen in (range(rank, rank + 1), range(rank + 1), range(rank, ranks)):
                    yield self._changed(chosen, change, most)
        for step in _STEPS:
            if step != self.step:
                yield attrs.evolve(self, step=step)

    def _changed(self, ranks: range, change: int, most: int) -> Ahead:
        late = tuple(
            min(max(number + change * (rank in ranks), 1), most)
            for rank, number in enumerate(self.late)
        )
        return attrs.evolve(self, late=late)


def families(problem: Problem) -> list[Ahead]:
    """Numbers ahead worth trying, the most promising first.

    The steady phase needs numbers that fall from the first rank, which memory bounds, to the last
    one in equal steps, so that no rank waits longer than another; the beginning wants as many as
    run until the first I arrives.
    """
    ranks, most = problem.ranks, most_ahead(problem)
    if ranks == 1:
        return [Ahead((1,), (number,), None) for number in sorted({1, most})]
    by_memory = [(most + extra) / (ranks - 1) for extra in (-1, 0, 1)]
    slopes = dict.fromkeys(min(slope, 2.5) for slope in (*by_memory, *_SLOPES))
    found: dict[Ahead, None] = {}
    starts = [_until_first_backward(problem, overshoot) for overshoot in (False, True)]
    for early in starts:
        found[Ahead(early, early, None)] = None
    for slope in slopes:
        for phase in _PHASES:
            late = tuple(
                min(most, 1 + math.floor(slope * (ranks - 1 - rank) + phase))
                for rank in range(ranks)
            )
            for step in _STEPS:
                for early in starts if step is not None else starts[:1]:
                    ahead = Ahead(early if step is not None else late, late, step)
                    found[ahead] = None
    return list(found)


def most_ahead(problem: Problem) -> int:
    """The most microbatches that the first rank may have ahead."""
    held, limit = problem.hold_forward[0], problem.limits[0]
    if held == 0 or limit == math.inf:
        return problem.microbatches
    return max(1, min(problem.microbatches, math.floor(limit / held * (1 + 1e-9))))


def _until_first_backward(problem: Problem, overshoot: bool) -> tuple[int, ...]:
    """For each rank as many F as run until its first I arrives, within memory.

    With ``overshoot`` one more, which delays that I. No rank has as many as the one before it, or
    it would wait for what that one has not run.
    """
    forward, backward, _ = problem.costs
    ranks, most = problem.ranks, problem.microbatches
    starts = [0.0]
    for rank in range(ranks - 1):
        starts.append(starts[-1] + forward[rank] + problem.hops[rank])
    numbers = [1] * ranks
    done = starts[-1] + forward[-1] + backward[-1]
    for rank in range(ranks - 2, -1, -1):
        arrival = done + problem.hops[rank]
        room = problem.limits[rank] * (1 + 1e-9)
        now = starts[rank] + forward[rank]
        while numbers[rank] < most and (numbers[rank] + 1) * problem.hold_forward[rank] <= room:
            if now >= arrival or (not overshoot and now + forward[rank] > arrival):
                break
            now += forward[rank]
            numbers[rank] += 1
        done = max(now, arrival) + backward[rank]
    for rank in range(1, ranks):
        if numbers[rank] >= numbers[rank - 1] and numbers[rank] < most:
            numbers[rank] = max(1, numbers[rank - 1] - 1)
    return tuple(numbers)
