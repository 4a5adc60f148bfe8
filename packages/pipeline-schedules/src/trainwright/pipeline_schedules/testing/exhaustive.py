"""The best makespan or span of small pipelines, by trying every order that may be better."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import attrs

F, I, W = range(3)  # noqa: E741


def optimum(
    times: Sequence[Sequence[float]],
    latency: float,
    microbatches: int,
    *,
    limit: float,
    held: float,
    objective: str,
    below: float,
) -> float:
    """The best value below ``below``, or that; one stage a rank, which takes microbatches in order.

    Microbatches are alike, so that taking them in order loses nothing. A rank decides what it does
    next before it can start, so that every order of every rank comes up; a branch ends where the
    remaining work alone makes it too late.

    Args:
        times: Of F, I and W, each for every stage.
        latency: From a stage to the next.
        microbatches: Microbatches of a step.
        limit: The most that a rank may hold; a microbatch is 1 from F to I.
        held: What a microbatch is from I to W.
        objective: ``"makespan"`` or ``"span"``.
        below: What is known to be reached.
    """
    trial = _Trial(times, latency, microbatches, limit, held, objective == "span", below)
    trial.explore([_Rank() for _ in times[0]])
    return trial.best


@attrs.define
class _Rank:
    """How far a rank is: numbers of F, I and W done, and the kind that it has decided for."""

    now: float = 0.0
    first: float | None = None
    done: list[int] = attrs.field(factory=lambda: [0, 0, 0])
    ends: tuple[list[float], list[float]] = attrs.field(factory=lambda: ([], []))
    decided: int | None = None


@attrs.define
class _Trial:
    """What is tried, and the best value so far."""

    times: Sequence[Sequence[float]]
    latency: float
    microbatches: int
    limit: float
    held: float
    by_span: bool
    best: float

    def explore(self, state: list[_Rank]) -> None:
        """Try everything that may follow on this state, which is changed."""
        self._settle(state)
        if self._at_least(state) >= self.best - 1e-9:
            return
        left = [rank for rank in state if rank.done[W] < self.microbatches]
        undecided = [rank for rank in left if rank.decided is None]
        if not left:
            self.best = self._at_least(state)
        if not undecided:
            return
        place = state.index(min(undecided, key=lambda rank: rank.now))
        for kind in (I, F, W):
            if self._allowed(state[place], kind):
                branch = copy.deepcopy(state)
                branch[place].decided = kind
                self.explore(branch)

    def _settle(self, state: list[_Rank]) -> None:
        """Run whatever is decided and can start."""
        moved = True
        while moved:
            moved = False
            for number, rank in enumerate(state):
                kind = rank.decided
                at = None if kind is None else self._arrival(state, number, kind)
                if kind is None or at is None:
                    continue
                start = max(rank.now, at)
                if rank.first is None:
                    rank.first = start if self.by_span else 0.0
                rank.now = start + self.times[kind][number]
                rank.done[kind] += 1
                if kind != W:
                    rank.ends[kind].append(rank.now)
                rank.decided = None
                moved = True

    def _arrival(self, state: list[_Rank], number: int, kind: int) -> float | None:
        """When what the next F, I or W of a rank needs is there."""
        microbatch = state[number].done[kind]
        if kind == W or (kind == F and number == 0):
            return 0.0
        if kind == I and number == len(state) - 1:
            return state[number].ends[F][microbatch]
        ends = state[number - 1].ends[F] if kind == F else state[number + 1].ends[I]
        return ends[microbatch] + self.latency if microbatch < len(ends) else None

    def _at_least(self, state: list[_Rank]) -> float:
        """The value, if nothing waits any more."""
        return max(
            rank.now
            + sum((self.microbatches - rank.done[k]) * self.times[k][r] for k in (F, I, W))
            - (rank.first or 0.0)
            for r, rank in enumerate(state)
        )

    def _allowed(self, rank: _Rank, kind: int) -> bool:
        forwards, inputs, weights = rank.done
        there = (forwards < self.microbatches, forwards > inputs, inputs > weights)
        memory = (forwards - inputs) + (inputs - weights) * self.held
        memory += (1.0, self.held - 1.0, -self.held)[kind]
        return there[kind] and memory <= self.limit + 1e-9
