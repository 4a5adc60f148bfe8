"""Strategies that draw schedules which work."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hypothesis import strategies as st

from trainwright.pipeline_schedules.actions import Action, Kind
from trainwright.pipeline_schedules.generate import (
    forward_only,
    gpipe,
    one_f_one_b,
    sequential,
)
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.weight_plan import WeightPlan

GENERATORS: Mapping[str, Callable[[int, int], Schedule]] = {
    "sequential": sequential,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "forward-only": forward_only,
}
"""Every generator of the package by the name its schedules carry: (stages, microbatches)."""


def generated_schedules(
    *, max_stages: int = 8, max_microbatches: int = 12
) -> st.SearchStrategy[Schedule]:
    """Schedules of the package's generators, also with fewer microbatches than stages."""
    return st.builds(
        lambda generator, stages, microbatches: generator(stages, microbatches),
        st.sampled_from(list(GENERATORS.values())),
        st.integers(1, max_stages),
        st.integers(1, max_microbatches),
    )


@st.composite
def ownerships(draw: st.DrawFn, *, max_ranks: int = 4, max_chunks: int = 3) -> tuple[int, ...]:
    """The rank of each stage: some rank order in every chunk, so loops, V shapes and others."""
    ranks = draw(st.integers(1, max_ranks))
    chunks = draw(st.integers(1, max_chunks))
    orders = [draw(st.permutations(range(ranks))) for _ in range(chunks)]
    return tuple(rank for order in orders for rank in order)


@st.composite
def valid_schedules(
    draw: st.DrawFn, *, max_ranks: int = 4, max_chunks: int = 3, max_microbatches: int = 4
) -> Schedule:
    """Any schedule that works: a drawn order in which every action follows what it needs.

    Each stage's backward of each microbatch is whole or split, as drawn.
    """
    rank_of_stage = draw(ownerships(max_ranks=max_ranks, max_chunks=max_chunks))
    microbatches = draw(st.integers(1, max_microbatches))
    randomness = draw(st.randoms(use_true_random=False))
    ready = [Action(Kind.F, 0, microbatch) for microbatch in range(microbatches)]
    programs: list[list[Action]] = [[] for _ in range(max(rank_of_stage) + 1)]
    while ready:
        action = ready.pop(randomness.randrange(len(ready)))
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        programs[rank_of_stage[stage]].append(action)
        backward = randomness.choice((Kind.B, Kind.I))
        if kind == Kind.F and stage + 1 < len(rank_of_stage):
            ready.append(Action(Kind.F, stage + 1, microbatch))
        elif kind == Kind.F:
            ready.append(Action(backward, stage, microbatch))
        elif kind in (Kind.B, Kind.I) and stage > 0:
            ready.append(Action(backward, stage - 1, microbatch))
        if kind == Kind.I:
            ready.append(Action(Kind.W, stage, microbatch))
    return Schedule(programs, rank_of_stage, microbatches, "drawn")


def weight_plans(*, max_kept: int = 3) -> st.SearchStrategy[WeightPlan]:
    """Plans for the weights of all stages, of none, or of the first."""
    return st.builds(
        WeightPlan,
        stages=st.sampled_from([None, None, (), (0,)]),
        keep=st.one_of(st.none(), st.integers(0, max_kept)),
        reduce_each_backward=st.booleans(),
    )
