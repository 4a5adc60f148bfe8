"""Schedules that loop over several chunks of the model on every rank: stage s on rank s mod p."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.schedule import Rows, Schedule
from trainwright.pipeline_schedules.turns import in_turn, joined, require_positive


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B: 1F1B over ``chunks`` stages a rank, which a microbatch visits in loops.

    Microbatches go in groups; a group passes a chunk of every rank, then the next chunk. With at
    least as many microbatches as ranks the bubble over ideal is ``(ranks - 1) / (chunks *
    microbatches)``, also where ranks do not divide microbatches: groups then hold a few more than
    ``ranks``, the larger ones first (Megatron-LM, which calls the size
    ``microbatch_group_size_per_vp_stage``, refuses a remainder below ``ranks``). With fewer
    microbatches than ranks there is one group. One chunk is 1F1B.

    Args:
        ranks: Ranks of the pipeline; stage s is on rank ``s mod ranks``.
        microbatches: Microbatches of a step, any number from 1.
        chunks: Stages a rank.

    Source: Narayanan et al., Megatron-LM (arXiv:2104.04473), section 2.2 and figure 4.
    """
    require_positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    if chunks == 1:
        warm_ups = [ranks - 1 - rank for rank in range(ranks)]
    else:
        largest = int(_group_sizes(ranks, microbatches)[0])
        warm_ups = [(chunks - 1) * largest + 2 * (ranks - 1 - rank) for rank in range(ranks)]
    order = _loops(ranks, microbatches, chunks)
    last = order[:, 0].max(initial=0)
    actions: list[Rows] = []
    for rank, warm_up in enumerate(warm_ups):
        # The column of microbatches first holds how many forwards, or backwards, came before.
        phases = [
            in_turn(warm_up, [(Kind.F, 0, 0)]),
            in_turn(len(order), [(Kind.F, 0, warm_up), (Kind.B, 0, 0)]),
        ]
        rows = joined(phases, len(order))
        visits = order[rows[:, 2]]
        chunk = np.where(rows[:, 0] == Kind.F, visits[:, 0], last - visits[:, 0])
        rows[:, 1] = chunk * ranks + rank
        rows[:, 2] = visits[:, 1]
        actions.append(rows)
    placed = [stage % ranks for stage in range(ranks * chunks)]
    return Schedule(actions, placed, microbatches, "interleaved-1f1b")


def breadth_first(
    ranks: int, microbatches: int, chunks: int, *, newest_first: bool = False
) -> Schedule:
    """Looped breadth-first: every chunk runs all forwards before the next, then so backwards.

    Bubble over ideal ``(ranks - 1) / (chunks * microbatches)`` with at least as many microbatches
    as ranks; every stage holds all microbatches. Each chunk's gradients are complete in one
    stretch, and its weights needed in two, which is what sharded data parallelism wants.

    Args:
        ranks: Ranks of the pipeline; stage s is on rank ``s mod ranks``.
        microbatches: Microbatches of a step, any number from 1.
        chunks: Stages a rank.
        newest_first: Run the backwards of a chunk from the last microbatch to the first, as
            PyTorch does; otherwise oldest first.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism (arXiv:2211.05953), figure 4.
    """
    require_positive(ranks=ranks, microbatches=microbatches, chunks=chunks)
    actions: list[Rows] = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [in_turn(microbatches, [(Kind.F, s, 0)]) for s in stages]
        backwards = [in_turn(microbatches, [(Kind.B, s, 0)]) for s in reversed(stages)]
        if newest_first:
            backwards = [rows[::-1] for rows in backwards]
        actions.append(joined([*forwards, *backwards], microbatches))
    placed = [stage % ranks for stage in range(ranks * chunks)]
    return Schedule(actions, placed, microbatches, "breadth-first")


def _group_sizes(ranks: int, microbatches: int) -> NDArray[np.int64]:
    """Microbatches of each group: at least as many as ranks, alike but for one, largest first."""
    groups = max(microbatches // ranks, 1)
    sizes = np.full(groups, microbatches // groups)
    sizes[: microbatches % groups] += 1
    return sizes


def _loops(ranks: int, microbatches: int, chunks: int) -> NDArray[np.int32]:
    """Chunk and microbatch of a rank's forwards in order: int32 ``[chunks * microbatches, 2]``."""
    ends = np.cumsum(_group_sizes(ranks, microbatches))
    groups = []
    for start, stop in itertools.pairwise([0, *ends.tolist()]):
        chunk, number = np.mgrid[:chunks, start:stop]
        groups.append(np.stack([chunk.ravel(), number.ravel()], axis=1))
    return np.concatenate(groups).astype(np.int32)
