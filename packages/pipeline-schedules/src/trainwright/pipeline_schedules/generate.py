"""The classical schedules, one stage a rank, each from its paper."""

from __future__ import annotations

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.turns import in_turn, joined, require_positive


def sequential(stages: int, microbatches: int) -> Schedule:
    """Layer-wise model parallelism: one microbatch at a time is anywhere in the pipeline.

    Every rank runs F0 B0 F1 B1 …; on one stage that is plain gradient accumulation. With one
    microbatch the bubble is ``stages - 1`` times the work.

    Source: the baseline of Huang et al., GPipe (arXiv:1811.06965), figure 2b.
    """
    require_positive(stages=stages, microbatches=microbatches)
    actions = [in_turn(microbatches, [(Kind.F, s, 0), (Kind.B, s, 0)]) for s in range(stages)]
    return Schedule(actions, range(stages), microbatches, "sequential")


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
    require_positive(stages=stages, microbatches=microbatches)
    actions = []
    for s in range(stages):
        backwards = in_turn(microbatches, [(Kind.B, s, 0)])
        backwards = backwards[::-1] if newest_first else backwards
        actions.append(joined([in_turn(microbatches, [(Kind.F, s, 0)]), backwards], microbatches))
    return Schedule(actions, range(stages), microbatches, "gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with a flush: after a warm-up each stage alternates one forward and one backward.

    Stage s holds at most ``min(microbatches, stages - s)`` microbatches; the bubble over ideal is
    GPipe's, ``(stages - 1) / microbatches``. Fewer microbatches than stages work.

    Source: Narayanan et al., PipeDream-Flush (arXiv:2006.09503), figure 2b, and Megatron-LM
    (arXiv:2104.04473), figure 4; the alternation is PipeDream's (arXiv:1806.03377).
    """
    require_positive(stages=stages, microbatches=microbatches)
    actions = []
    for s in range(stages):
        warm_up = stages - 1 - s
        phases = [
            in_turn(warm_up, [(Kind.F, s, 0)]),
            in_turn(microbatches, [(Kind.F, s, warm_up), (Kind.B, s, 0)]),
        ]
        actions.append(joined(phases, microbatches))
    return Schedule(actions, range(stages), microbatches, "1f1b")


def forward_only(stages: int, microbatches: int) -> Schedule:
    """Forwards without backwards, microbatch after microbatch, for evaluation."""
    require_positive(stages=stages, microbatches=microbatches)
    actions = [in_turn(microbatches, [(Kind.F, s, 0)]) for s in range(stages)]
    return Schedule(actions, range(stages), microbatches, "forward-only", forward_only=True)
