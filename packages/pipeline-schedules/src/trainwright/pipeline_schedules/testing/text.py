"""Schedules written out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.pipeline_schedules.actions import Action
from trainwright.pipeline_schedules.schedule import Schedule


def from_text(
    text: str,
    rank_of_stage: Sequence[int],
    microbatches: int,
    *,
    forward_only: bool = False,
    lowered: bool = False,
) -> Schedule:
    """Read a schedule with a line a rank and spaces between actions, such as ``0F0 0SEND_F0``."""
    actions = [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]
    flags = {"forward_only": forward_only, "lowered": lowered}
    return Schedule(actions, rank_of_stage, microbatches, "from text", **flags)
