"""Strategies that draw schedules which work."""

from __future__ import annotations

from random import Random

import attrs
from hypothesis import strategies as st

from trainwright.pipeline_schedules.actions import BACKWARD_KINDS, FORWARD_KINDS, Action, Kind
from trainwright.pipeline_schedules.generators import GENERATORS
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.weight_plan import WeightPlan


def generated_schedules(
    *, max_ranks: int = 8, max_microbatches: int = 12, max_chunks: int = 3
) -> st.SearchStrategy[Schedule]:
    """Schedules of the package's generators, also with fewer microbatches than stages."""
    return st.builds(
        lambda generator, ranks, microbatches, chunks: generator.make(
            ranks, microbatches, generator.chunks or chunks
        ),
        st.sampled_from(list(GENERATORS.values())),
        st.integers(1, max_ranks),
        st.integers(1, max_microbatches),
        st.integers(1, max_chunks),
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
    draw: st.DrawFn,
    *,
    max_ranks: int = 4,
    max_chunks: int = 3,
    max_microbatches: int = 4,
    overlaps: bool = False,
) -> Schedule:
    """Any schedule that works: a drawn order in which every action follows what it needs.

    Each stage's backward of each microbatch is whole or split, as drawn. With ``overlaps`` some
    schedules have pairs of a forward and a backward.
    """
    rank_of_stage = draw(ownerships(max_ranks=max_ranks, max_chunks=max_chunks))
    microbatches = draw(st.integers(1, max_microbatches))
    randomness = draw(st.randoms(use_true_random=False))
    overlaps = overlaps and draw(st.booleans())
    ready = [Action(Kind.F, 0, microbatch) for microbatch in range(microbatches)]
    programs: list[list[Action]] = [[] for _ in range(max(rank_of_stage) + 1)]
    while ready:
        action = ready.pop(randomness.randrange(len(ready)))
        rank = rank_of_stage[action.stage]
        beside = [other for other in ready if rank_of_stage[other.stage] == rank]
        beside = [other for other in beside if other.kind in BACKWARD_KINDS]
        block = [action]
        if overlaps and action.kind == Kind.F and beside:
            block = [attrs.evolve(action, kind=Kind.F_PAIRED), randomness.choice(beside)]
            ready.remove(block[1])
        programs[rank] += block
        for member in block:
            ready += _enabled(member, len(rank_of_stage), randomness)
    return Schedule(programs, rank_of_stage, microbatches, "drawn")


def _enabled(action: Action, stages: int, randomness: Random) -> list[Action]:
    """What can run once an action has."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    backward = randomness.choice(BACKWARD_KINDS)
    enabled = []
    if kind in FORWARD_KINDS and stage + 1 < stages:
        enabled.append(Action(Kind.F, stage + 1, microbatch))
    elif kind in FORWARD_KINDS:
        enabled.append(Action(backward, stage, microbatch))
    elif kind in BACKWARD_KINDS and stage > 0:
        enabled.append(Action(backward, stage - 1, microbatch))
    if kind == Kind.I:
        enabled.append(Action(Kind.W, stage, microbatch))
    return enabled


def weight_plans(*, max_kept: int = 3) -> st.SearchStrategy[WeightPlan]:
    """Plans for the weights of all stages, of none, or of the first."""
    return st.builds(
        WeightPlan,
        stages=st.sampled_from([None, None, (), (0,)]),
        keep=st.one_of(st.none(), st.integers(0, max_kept)),
        reduce_each_backward=st.booleans(),
    )
