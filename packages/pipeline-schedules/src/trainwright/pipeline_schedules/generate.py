"""The classical schedules, one stage a rank, each from its paper."""

from __future__ import annotations

import numpy as np

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Rows, Schedule


def sequential(stages: int, microbatches: int) -> Schedule:
    """Layer-wise model parallelism: one microbatch at a time is anywhere in the pipeline.

    Every rank runs F0 B0 F1 B1 …; on one stage that is plain gradient accumulation. With one
    microbatch the bubble is ``stages - 1`` times the work.

    Source: the baseline of Huang et al., GPipe (arXiv:1811.06965), figure 2b.
    """
    _require_positive(stages, microbatches)
    rows = np.empty((2 * microbatches, 2), dtype=np.int32)
    rows[0::2] = _column_pair(Kind.F, np.arange(microbatches))
    rows[1::2] = _column_pair(Kind.B, np.arange(microbatches))
    return _one_stage_a_rank("sequential", [rows] * stages, microbatches)


def gpipe(stages: int, microbatches: int, *, newest_first: bool = False) -> Schedule:
    """GPipe: all forwards, then all backwards; every stage holds all microbatches at once.

    Bubble over ideal ``(stages - 1) / microbatches``.

    Args:
        stages: Stages, one a rank.
        microbatches: Microbatches of a step, any number from 1.
        newest_first: Run the backwards from the last microbatch to the first, as the GPipe paper
            draws them; otherwise oldest first, as Megatron-LM (arXiv:2104.04473, figure 3) draws
            and PyTorch runs them, so that gradients are added in the order of the serial run.

    Source: Huang et al., GPipe (arXiv:1811.06965), figure 2c.
    """
    _require_positive(stages, microbatches)
    forwards = np.arange(microbatches)
    backwards = forwards[::-1] if newest_first else forwards
    rows = np.concatenate([_column_pair(Kind.F, forwards), _column_pair(Kind.B, backwards)])
    return _one_stage_a_rank("gpipe", [rows] * stages, microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with a flush: after a warm-up each stage alternates one forward and one backward.

    Stage s holds at most ``min(microbatches, stages - s)`` microbatches; the bubble over ideal is
    GPipe's, ``(stages - 1) / microbatches``. Fewer microbatches than stages work.

    Source: Narayanan et al., PipeDream-Flush (arXiv:2006.09503), figure 2b, and Megatron-LM
    (arXiv:2104.04473), figure 4; the alternation is PipeDream's (arXiv:1806.03377).
    """
    _require_positive(stages, microbatches)
    per_rank = [
        _one_f_one_b_rows(min(microbatches, stages - s), microbatches) for s in range(stages)
    ]
    return _one_stage_a_rank("1f1b", per_rank, microbatches)


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Forwards without backwards, microbatch after microbatch, for evaluation."""
    _require_positive(stages, microbatches)
    rows = _column_pair(Kind.F, np.arange(microbatches))
    return _one_stage_a_rank("forward-only", [rows] * stages, microbatches, forward_only=True)


def _one_f_one_b_rows(in_flight: int, microbatches: int) -> Rows:
    """Kinds and microbatches of a stage that starts with ``in_flight`` forwards."""
    number = np.arange(microbatches)
    extra = np.maximum(number - in_flight, -1)
    place_of_forward = np.where(number < in_flight, number, in_flight + 2 * extra + 1)
    place_of_backward = np.minimum(in_flight + 2 * number, microbatches + number)
    rows = np.empty((2 * microbatches, 2), dtype=np.int32)
    rows[place_of_forward] = _column_pair(Kind.F, number)
    rows[place_of_backward] = _column_pair(Kind.B, number)
    return rows


def _column_pair(kind: Kind, microbatches: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Rows:
    rows = np.empty((len(microbatches), 2), dtype=np.int32)
    rows[:, 0] = kind
    rows[:, 1] = microbatches
    return rows


def _one_stage_a_rank(
    name: str, per_rank: list[Rows], microbatches: int, *, forward_only: bool = False
) -> Schedule:
    """Put the stage number, which is the rank, between kind and microbatch."""
    actions = []
    for stage, rows in enumerate(per_rank):
        with_stage = np.full((len(rows), 3), stage, dtype=np.int32)
        with_stage[:, ::2] = rows
        actions.append(with_stage)
    ranks = range(len(per_rank))
    return Schedule(actions, ranks, microbatches, name, forward_only=forward_only)


def _require_positive(stages: int, microbatches: int) -> None:
    if stages < 1:
        raise ScheduleError(f"stages must be at least 1, got {stages}")
    if microbatches < 1:
        raise ScheduleError(f"microbatches must be at least 1, got {microbatches}")
