"""PyTorch's own schedules are an oracle for those that both generate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from trainwright.pipeline_schedules import (
    Kind,
    Schedule,
    breadth_first,
    dualpipe_v,
    interleaved_1f1b,
    zb_v,
)


def words(schedule: Schedule, rank: int) -> list[str]:
    """The actions of a rank as PyTorch prints them, a pair as one."""
    printed: list[str] = []
    forward = None
    for action in schedule.program(rank):
        text = str(action)
        if forward is not None:
            printed.append(f"({forward};{text})OVERLAP_F_B")
            forward = None
        elif action.kind == Kind.F_PAIRED:
            forward = f"{action.stage}F{action.microbatch}"
        else:
            printed.append(text)
    return printed


def pytorch_words(of: type, ranks: int, microbatches: int, chunks: int, rank: int) -> list[str]:
    """What PyTorch's class plans for a rank, without the process group that making one takes."""
    rounds = max(1, microbatches // ranks)
    sizes = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=ranks * chunks,
        _stages=range(chunks),
        n_local_stages=chunks,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    plan: Any = of._calculate_single_rank_operations  # type: ignore[attr-defined]
    return [str(action) for action in plan(sizes, rank) if action is not None]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_zb_v_and_dualpipe_v_are_what_pytorch_plans(ranks: int) -> None:
    for microbatches in (1, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        for rank in range(ranks):
            ours = words(zb_v(ranks, microbatches), rank)
            sizes = (ranks, microbatches, 2, rank)
            assert ours == pytorch_words(theirs.ScheduleZBVZeroBubble, *sizes)
            if microbatches >= 2 * ranks:
                ours = words(dualpipe_v(ranks, microbatches), rank)
                assert ours == pytorch_words(theirs.ScheduleDualPipeV, *sizes)


@pytest.mark.parametrize("chunks", [2, 3])
def test_looped_schedules_are_what_pytorch_plans_where_it_has_a_plan(chunks: int) -> None:
    for ranks, microbatches in ((2, 1), (2, 4), (2, 5), (4, 8), (4, 10), (4, 3)):
        for rank in range(ranks):
            sizes = (ranks, microbatches, chunks, rank)
            ours = words(breadth_first(ranks, microbatches, chunks, newest_first=True), rank)
            assert ours == pytorch_words(theirs.ScheduleLoopedBFS, *sizes)
            if microbatches % max(1, microbatches // ranks) == 0:
                ours = words(interleaved_1f1b(ranks, microbatches, chunks), rank)
                assert ours == pytorch_words(theirs.ScheduleInterleaved1F1B, *sizes)
