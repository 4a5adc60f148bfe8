"""Schedules as the tables that PyTorch's pipelining reads."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright.pipeline_schedules.actions import NO_MICROBATCH, STAGE_KINDS, Action, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule

_BACKWARDS = (Kind.B, Kind.I)


def to_csv(schedule: Schedule) -> str:
    """The table that PyTorch's pipelining reads: a line a rank, actions between commas.

    A schedule without transfers is PyTorch's ``compute_only`` form, which its runtime completes
    itself; a lowered one is its ``compute_comms`` form, which it runs as it stands. An overlapped
    pair is one cell, ``(0F3;7B1)OVERLAP_F_B``. Idle time is not written: PyTorch's runtime drops
    the empty cells that its own tables hold.

    Raises:
        ScheduleError: A paired forward stands before something else than its backward.
    """
    lines = [",".join(_cells(schedule, rank)) for rank in range(schedule.num_ranks)]
    return "".join(f"{line}\n" for line in lines)


def write_csv(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write the table of `to_csv` into a file, for PyTorch's ``_load_csv`` or for `read_csv`."""
    Path(path).write_text(to_csv(schedule), encoding="ascii", newline="")


def _cells(schedule: Schedule, rank: int) -> list[str]:
    words = {kind: str(Action(kind, 0, _number(kind))).strip("0") for kind in Kind}
    cells: list[str] = []
    rows = schedule.actions[rank].tolist()
    paired: str | None = None
    for kind, stage, microbatch in rows:
        if kind == Kind.F_PAIRED and paired is None:
            paired = f"{stage}F{microbatch}"
            continue
        number = "" if microbatch == NO_MICROBATCH else microbatch
        cell = f"{stage}{words[kind]}{number}"
        if paired is not None:
            if kind not in _BACKWARDS:
                raise _unpaired(rank, paired, cell)
            cell = f"({paired};{cell})OVERLAP_F_B"
            paired = None
        cells.append(cell)
    if paired is not None:
        raise _unpaired(rank, paired, "the end")
    return cells


def _number(kind: Kind) -> int:
    return NO_MICROBATCH if kind in STAGE_KINDS else 0


def _unpaired(rank: int, paired: str, next_cell: str) -> ScheduleError:
    return ScheduleError(
        f"{paired} on rank {rank} is one half of an overlapped pair, so that the B or I that it "
        f"overlaps with must stand right behind it, but {next_cell} does"
    )
