"""The exact search of the operator planner: sets of decisions that none other beats."""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from .operator_graph import DecisionGraph, Relaxed, Step, relax

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

# Partial plans of one state that are carried on: few at first, to learn how fast a plan can be,
# which then excludes most of the others.
_LIMITS = (300, 20_000)
_TOLERANCE = 1e-12


class Found(NamedTuple):
    """The fastest decisions within a budget, and a proof: none are faster than ``bound_s``."""

    time_s: float
    num_bytes: int
    steps: list[Step]
    bound_s: float


@attrs.frozen(eq=False)
class _Labels:
    """Partial plans that end in one state, from few bytes and much time to the opposite."""

    num_bytes: Whole
    time_s: Floats
    # Where each came from: the state and the place in it on the level before, and the step taken.
    state: Whole
    place: Whole
    step: Whole

    def take(self, which: NDArray[np.bool_] | Whole) -> _Labels:
        """Return some of the labels, or all in another order."""
        return _Labels(
            self.num_bytes[which],
            self.time_s[which],
            self.state[which],
            self.place[which],
            self.step[which],
        )

    @classmethod
    def joined(cls, parts: list[_Labels]) -> _Labels:
        """Return the labels of all parts."""
        return cls(
            np.concatenate([part.num_bytes for part in parts]),
            np.concatenate([part.time_s for part in parts]),
            np.concatenate([part.state for part in parts]),
            np.concatenate([part.place for part in parts]),
            np.concatenate([part.step for part in parts]),
        )


def fastest(graph: DecisionGraph, budget_bytes: int) -> Found | None:
    """Return the fastest decisions that keep at most so many bytes; None if there are none.

    First the price of a byte is found at which plans just fit (a Lagrangian relaxation: each price
    bounds the time of every plan from below). Then partial plans are extended operator by
    operator; those that another beats in bytes and in time, and those that the bound excludes, are
    dropped. Of equally fast plans, the one of fewest bytes is returned.
    """
    smallest = relax(graph, 0.0, 1.0)
    if smallest.num_bytes > budget_bytes:
        return None
    quickest = relax(graph, 1.0, 0.0)
    cheap, best = _price(graph, budget_bytes, quickest, smallest)
    found = Found(best.time_s, best.num_bytes, best.steps, 0.0)
    for limit in _LIMITS:
        search = _Search(graph, budget_bytes, [cheap, (quickest, 0.0)], smallest, found, limit)
        found = search.run()
        if found.bound_s >= found.time_s:
            break
    return found


def _price(
    graph: DecisionGraph, budget_bytes: int, fast: Relaxed, small: Relaxed
) -> tuple[tuple[Relaxed, float], Relaxed]:
    """Return the relaxation of the best price, with it, and the best plan seen that fits."""
    if fast.num_bytes <= budget_bytes:
        return (fast, 0.0), fast
    best, price, found = small, 0.0, fast
    while True:
        slope = (small.time_s - fast.time_s) / (fast.num_bytes - small.num_bytes)
        between = relax(graph, 1.0, slope)
        if between.num_bytes <= budget_bytes and between.time_s < best.time_s:
            best = between
        on_line = small.time_s + slope * small.num_bytes
        at = between.time_s + slope * between.num_bytes
        price, found = slope, between
        if slope <= 0.0 or at >= on_line * (1.0 - _TOLERANCE) - 1e-300:
            return (found, price), best
        if between.num_bytes <= budget_bytes:
            small = between
        else:
            fast = between


class _Search:
    """Extends partial plans level by level."""

    def __init__(
        self,
        graph: DecisionGraph,
        budget_bytes: int,
        relaxations: list[tuple[Relaxed, float]],
        smallest: Relaxed,
        best: Found,
        limit: int,
    ) -> None:
        self._graph = graph
        self._budget = budget_bytes
        self._relaxations = relaxations
        self._smallest = smallest
        self._best = best
        self._most_s = best.time_s * (1.0 + _TOLERANCE)
        self._dropped_s = math.inf
        self._limit = limit

    def run(self) -> Found:
        """Return the best plan."""
        none = np.zeros(1, dtype=np.int64)
        levels = [{0: _Labels(none, np.zeros(1), none, none, none)}]
        for k, level in enumerate(self._graph.levels):
            levels.append(self._extend(k, level, levels[-1]))
        ends = [
            (float(labels.time_s[-1]), int(labels.num_bytes[-1]), state)
            for state, labels in levels[-1].items()
            if labels.time_s.size
        ]
        best = self._best
        if not ends or min(ends)[0] > self._most_s:  # only where labels were dropped unproved
            return best._replace(bound_s=self._dropped_s)
        time_s, num_bytes, state = min(ends)
        steps = self._trace(levels, state)
        return Found(time_s, num_bytes, steps, min(time_s, self._dropped_s))

    def _extend(
        self, k: int, level: list[list[Step]], before: dict[int, _Labels]
    ) -> dict[int, _Labels]:
        into: dict[int, list[_Labels]] = {}
        for state, labels in before.items():
            count = len(labels.time_s)
            places = np.arange(count)
            for number, step in enumerate(level[state]):
                into.setdefault(step.target, []).append(
                    _Labels(
                        labels.num_bytes + step.num_bytes,
                        labels.time_s + step.time_s,
                        np.full(count, state),
                        places,
                        np.full(count, number),
                    )
                )
        return {state: self._prune(k + 1, state, parts) for state, parts in into.items()}

    def _prune(self, k: int, state: int, parts: list[_Labels]) -> _Labels:
        merged = _Labels.joined(parts)
        bound = self._bound(k, state, merged)
        fits = merged.num_bytes + self._smallest.rests[k][state] <= self._budget
        labels = merged.take(fits & (bound <= self._most_s))
        order = np.lexsort((labels.time_s, labels.num_bytes))
        labels = labels.take(order)
        if not labels.time_s.size:
            return labels
        # In the order of bytes a label is of use only if it is faster than all before it.
        fastest_before = np.minimum.accumulate(labels.time_s)
        useful = np.ones(len(order), dtype=bool)
        useful[1:] = labels.time_s[1:] < fastest_before[:-1]
        labels = labels.take(useful)
        return self._thin(k, state, labels)

    def _bound(self, k: int, state: int, labels: _Labels) -> Floats:
        """Return the least time of any plan within the budget that begins with each label."""
        bounds = [
            labels.time_s
            + price * (labels.num_bytes - float(self._budget))
            + relaxed.rests[k][state]
            for relaxed, price in self._relaxations
        ]
        highest: Floats = np.maximum.reduce(bounds)
        return highest

    def _thin(self, k: int, state: int, labels: _Labels) -> _Labels:
        """Keep the most promising labels where there are too many, and remember the others."""
        if len(labels.time_s) <= self._limit:
            return labels
        bound = self._bound(k, state, labels)
        order = np.argsort(bound, kind="stable")
        self._dropped_s = min(self._dropped_s, float(bound[order[self._limit]]))
        chosen = np.sort(order[: self._limit])
        return labels.take(chosen)

    def _trace(self, levels: list[dict[int, _Labels]], state: int) -> list[Step]:
        steps: list[Step] = []
        index = len(levels[-1][state].time_s) - 1
        for k in range(len(self._graph.levels) - 1, -1, -1):
            labels = levels[k + 1][state]
            before, number = int(labels.state[index]), int(labels.step[index])
            index, state = int(labels.place[index]), before
            steps.append(self._graph.levels[k][before][number])
        steps.reverse()
        return steps
