"""The action letters and the table form of ``torch.distributed.pipelining``."""

from __future__ import annotations

from trainwright.pipeline_schedules.schedule import Schedule


def action_letters(schedule: Schedule, rank: int) -> list[str]:
    """The actions of a rank in order as PyTorch writes them: ``["0F0", "0F1", "0B0", …]``."""
    return [str(action) for action in schedule.program(rank)]


def to_csv(schedule: Schedule) -> str:
    """The table that PyTorch's pipelining reads: a line a rank, actions between commas.

    A schedule without transfers is its ``compute_only`` form, a lowered one ``compute_comms``.
    """
    lines = [",".join(action_letters(schedule, rank)) for rank in range(schedule.num_ranks)]
    return "".join(f"{line}\n" for line in lines)
