"""Zero-bubble schedules with one stage a rank: the weight gradient waits and fills the bubble."""

from __future__ import annotations

from trainwright.pipeline_schedules.actions import Kind
from trainwright.pipeline_schedules.schedule import Rows, Schedule
from trainwright.pipeline_schedules.turns import in_turn, joined, require_positive


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with the backward split, at the memory that 1F1B takes on its first stage.

    Stage s runs its weight gradients s microbatches behind its input gradients, and the rest at
    the end. For F, I and W, with W at most I and F, the makespan is ``(stages - 1) (F + I - W)``
    above the work: a third of 1F1B's bubble where they are equal. Every stage holds up to
    ``stages`` microbatches, of which s wait for W only. Fewer microbatches than stages work.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.1 and
    figure 2; the handcrafted schedule of the authors' ``efficiency.py``.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return _handcrafted("zb-h1", stages, microbatches, 1)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: more forwards ahead, so that no stage waits between its first and last action.

    Twice as many forwards as ZB-H1 come before the first backward, and weight gradients wait twice
    as long. With at least ``2 stages - 1`` microbatches and W at most I and F, the span is
    ``(stages - 1) (F + I - 2 W)`` above the work, so nothing for F = I = W, where the makespan
    keeps ``stages - 1`` forwards. Stages hold up to ``2 stages - 1`` microbatches.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.2 and
    figure 3; the handcrafted schedule of the authors' ``efficiency.py``.
    """
    require_positive(stages=stages, microbatches=microbatches)
    return _handcrafted("zb-h2", stages, microbatches, 2)


def _handcrafted(name: str, stages: int, microbatches: int, ahead: int) -> Schedule:
    """One stage a rank, each ``ahead`` forwards further than the next when it turns to backward."""
    actions = [_stage_rows(s, stages, microbatches, ahead) for s in range(stages)]
    return Schedule(actions, range(stages), microbatches, name)


def _stage_rows(stage: int, stages: int, microbatches: int, ahead: int) -> Rows:
    warm_up = (stages - 1 - stage) * ahead
    behind = stage * ahead
    phases = [
        in_turn(warm_up, [(Kind.F, stage, 0)]),
        in_turn(
            microbatches, [(Kind.F, stage, warm_up), (Kind.I, stage, 0), (Kind.W, stage, -behind)]
        ),
        in_turn(behind, [(Kind.W, stage, microbatches - behind)]),
    ]
    return joined(phases, microbatches)
