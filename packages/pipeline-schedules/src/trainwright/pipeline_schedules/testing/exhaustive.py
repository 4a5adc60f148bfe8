"""The best makespan or span of small pipelines, by trying every order that may be better."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import attrs

F, I, W = range(3)  # noqa: E741


@attrs.define
class Rank:
    """How far a rank is: numbers of F, I and W done, and the kind that it has decided for."""

    now: float = 0.0
    first: float | None = None
    done: list[int] = attrs.field(factory=lambda: [0, 0, 0])
    ends: tuple[list[float], list[float]] = attrs.field(factory=lambda: ([], []))
    decided: int | None = None


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
    """
    best = below
    ranks = len(times[0])

    def ready(state: list[Rank], r: int) -> float | None:
        kind, number = state[r].decided, state[r].done[state[r].decided or 0]
        if kind == W or (kind == F and r == 0):
            return 0.0
        if kind == I and r == ranks - 1:
            return state[r].ends[F][number]
        source, way = (r - 1, F) if kind == F else (r + 1, I)
        ends = state[source].ends[way]
        return ends[number] + latency if number < len(ends) else None

    def settle(state: list[Rank]) -> None:
        """Run whatever is decided and can start."""
        moved = True
        while moved:
            moved = False
            for r, rank in enumerate(state):
                if rank.decided is None or (at := ready(state, r)) is None:
                    continue
                start = max(rank.now, at)
                if rank.first is None:
                    rank.first = start if objective == "span" else 0.0
                rank.now = start + times[rank.decided][r]
                rank.done[rank.decided] += 1
                if rank.decided != W:
                    rank.ends[rank.decided].append(rank.now)
                rank.decided = None
                moved = True

    def at_least(state: list[Rank]) -> float:
        return max(
            rank.now
            + sum((microbatches - rank.done[kind]) * times[kind][r] for kind in (F, I, W))
            - (rank.first or 0.0)
            for r, rank in enumerate(state)
        )

    def allowed(rank: Rank, kind: int) -> bool:
        done, open_f, open_i = rank.done, rank.done[F] - rank.done[I], rank.done[I] - rank.done[W]
        memory = open_f + open_i * held + (1, held - 1, -held)[kind]
        there = (done[F] < microbatches, open_f > 0, open_i > 0)
        return there[kind] and memory <= limit + 1e-9

    def explore(state: list[Rank]) -> None:
        nonlocal best
        settle(state)
        if at_least(state) >= best - 1e-9:
            return
        undecided = [rank for rank in state if rank.decided is None and rank.done[W] < microbatches]
        if not undecided:
            if all(rank.done[W] == microbatches for rank in state):
                best = at_least(state)
            return
        place = state.index(min(undecided, key=lambda rank: rank.now))
        for kind in (I, F, W):
            if allowed(state[place], kind):
                branch = copy.deepcopy(state)
                branch[place].decided = kind
                explore(branch)

    explore([Rank() for _ in range(ranks)])
    return best
