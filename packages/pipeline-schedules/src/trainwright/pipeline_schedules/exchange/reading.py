"""Schedules from the tables that PyTorch's pipelining writes."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainwright.pipeline_schedules.actions import COMPUTE_KINDS, NO_MICROBATCH, Action, Kind
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule

_Row = tuple[int, int, int]
_NUMBERED = re.compile(r"(\d{1,18})([A-Z_]+)(\d{0,18})", re.ASCII)
_PAIR = re.compile(r"\((?P<parts>.*)\)(?P<word>\w*)")
_PAIR_WORD = "OVERLAP_F_B"
_FORWARD_KINDS = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.GATHER, Kind.RELEASE)
_LARGEST = 2**31 - 2
_MISSING = 1000
"""How many actions a table may lack before its microbatch numbers are taken for slips."""


class TableError(ScheduleError):
    """A table that is no schedule; the message says where and why.

    Attributes:
        row: The line of the table, from 1; line r holds the actions of rank r - 1.
        column: The cell in that line, from 1; None where the whole table is concerned.
    """

    def __init__(self, reason: str, row: int, column: int | None = None) -> None:
        place = "" if column is None else f"row {row} (rank {row - 1}), column {column}: "
        super().__init__(place + reason)
        self.row = row
        self.column = column


def from_csv(
    text: str,
    *,
    name: str = "",
    num_microbatches: int | None = None,
    rank_of_stage: Sequence[int] | None = None,
) -> Schedule:
    """Read a table of ``torch.distributed.pipelining``, in either of its forms.

    Line r holds the actions of rank r, between commas, such as ``0F0``, ``1SEND_B3``,
    ``2UNSHARD`` or ``(0F3;7B1)OVERLAP_F_B``. Empty cells, which PyTorch writes for idle time, are
    dropped. A table with transfers, gathers or reductions (``compute_comms``) gives a lowered
    schedule, one without (``compute_only``) one that `lower` can lower; a table without backwards
    gives a forward-only one. Only the form is checked: what works is for `verify` to say.

    Args:
        text: The table.
        name: What to call the schedule.
        num_microbatches: Microbatches of a step; None for as many as the table names.
        rank_of_stage: The rank of each stage; None for the rank that runs it in the table.

    Raises:
        TableError: A cell is no action, a stage stands on two ranks, a stage is missing, or the
            table is empty; ``row`` and ``column`` say where.
        ScheduleError: `num_microbatches` or `rank_of_stage` do not fit a schedule.
    """
    programs = []
    owners: dict[int, int] = {}
    for rank, cells in enumerate(_lines(text)):
        program = list(_rows_of(cells, rank))
        if rank_of_stage is None:
            _note_owners(owners, program, rank)
        programs.append([row for _, row in program])
    if not any(programs):
        raise TableError("the table holds no actions; write a line for each rank", row=1)
    if rank_of_stage is None:
        rank_of_stage = _in_order(owners)
    kinds = {kind for program in programs for kind, _, _ in program}
    if num_microbatches is None:
        num_microbatches = max(_largest_microbatch(programs) + 1, 1)
    return Schedule(
        programs,
        rank_of_stage,
        num_microbatches,
        name,
        forward_only=kinds.issubset((*_FORWARD_KINDS, Kind.F_PAIRED)),
        lowered=not kinds.issubset((*COMPUTE_KINDS, Kind.F_PAIRED)),
    )


def read_csv(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    num_microbatches: int | None = None,
    rank_of_stage: Sequence[int] | None = None,
) -> Schedule:
    """Read a file that PyTorch's ``_dump_csv`` or `write_csv` wrote; arguments as in `from_csv`.

    Args:
        path: The file.
        name: What to call the schedule; None for the name of the file.
        num_microbatches: Microbatches of a step; None for as many as the table names.
        rank_of_stage: The rank of each stage; None for the rank that runs it in the table.

    Raises:
        TableError: As in `from_csv`, or the file is no text.
        OSError: The file cannot be read.
    """
    label = Path(path).stem if name is None else name
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(f"{os.fspath(path)} is no text: {error}", row=1) from None
    return from_csv(
        text, name=label, num_microbatches=num_microbatches, rank_of_stage=rank_of_stage
    )


def _lines(text: str) -> Iterator[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        yield from reader
    except csv.Error as error:
        raise TableError(f"the table is no CSV: {error}", row=reader.line_num) from None


def _rows_of(cells: Sequence[str], rank: int) -> Iterator[tuple[int, _Row]]:
    """The actions of a line, each with its column; a pair gives two."""
    known: dict[tuple[str, bool], Kind] = {}
    for column, cell in enumerate(cells, start=1):
        text = cell.strip()
        try:
            if text.startswith("("):
                yield from ((column, row) for row in _pair(text))
            elif text:
                yield column, _single(text, known)
        except TableError:
            raise
        except ScheduleError as error:
            raise TableError(str(error), rank + 1, column) from None


def _single(text: str, known: dict[tuple[str, bool], Kind]) -> _Row:
    match = _NUMBERED.fullmatch(text)
    if match is None:
        Action.parse(text)
        raise ScheduleError(f"{text!r} is not an action")
    stage, word, number = match.groups()
    if (word, number != "") not in known:
        known[word, number != ""] = _kind(text)
    microbatch = int(number) if number else NO_MICROBATCH
    if max(int(stage), microbatch) > _LARGEST:
        raise ScheduleError(f"{text!r} has a number above {_LARGEST}")
    return known[word, number != ""], int(stage), microbatch


def _kind(text: str) -> Kind:
    kind = Action.parse(text).kind
    if kind == Kind.F_PAIRED:
        raise ScheduleError(
            f"{text!r} stands alone; a table holds both halves of an overlapped pair in one cell, "
            f"as in (0F3;7B1){_PAIR_WORD}"
        )
    return kind


def _pair(text: str) -> tuple[_Row, _Row]:
    """A forward and the backward that it overlaps with, whichever is written first."""
    match = _PAIR.fullmatch(text)
    if match is None or match["word"] != _PAIR_WORD:
        raise ScheduleError(f"{text!r} is not an action; a pair is written (0F3;7B1){_PAIR_WORD}")
    parts = [_single(part.strip(), {}) for part in match["parts"].split(";")]
    forwards = [row for row in parts if row[0] == Kind.F]
    backwards = [row for row in parts if row[0] in (Kind.B, Kind.I)]
    if len(parts) != 2 or len(forwards) != 1 or len(backwards) != 1:
        raise ScheduleError(f"{text!r} must hold one F and one B or I")
    return (Kind.F_PAIRED, *forwards[0][1:]), backwards[0]


def _note_owners(owners: dict[int, int], program: list[tuple[int, _Row]], rank: int) -> None:
    for column, (_, stage, _) in program:
        owner = owners.setdefault(stage, rank)
        if owner != rank:
            raise TableError(
                f"stage {stage} runs here, but also on rank {owner}; a stage has one rank",
                rank + 1,
                column,
            )


def _in_order(owners: dict[int, int]) -> list[int]:
    for stage in range(len(owners)):
        if stage not in owners:
            raise TableError(
                f"no rank runs stage {stage}, though stage {max(owners)} is there; give "
                f"rank_of_stage where that is meant",
                row=1,
            )
    return [owners[stage] for stage in range(len(owners))]


def _largest_microbatch(programs: Sequence[Sequence[_Row]]) -> int:
    """The largest number, unless it can only be a slip: what follows takes room for all below."""
    largest = max(number for program in programs for _, _, number in program)
    num_actions = sum(len(program) for program in programs)
    if largest > num_actions + _MISSING:
        raise TableError(
            f"the table names microbatch {largest}, but holds {num_actions} actions; give "
            f"num_microbatches where that is meant",
            row=1,
        )
    return largest
