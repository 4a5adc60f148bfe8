"""The action letters of ``torch.distributed.pipelining``."""

from __future__ import annotations

from trainwright.pipeline_schedules.schedule import Schedule


def action_letters(schedule: Schedule, rank: int) -> list[str]:
    """The actions of a rank in order as PyTorch writes them: ``["0F0", "0F1", "0B0", …]``."""
    return [str(action) for action in schedule.program(rank)]
