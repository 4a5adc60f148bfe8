"""Schedules as text that a person can read: time from left to right, a line a rank."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import Action, Kind
from trainwright.pipeline_schedules.bars import headline
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.simulate import Simulation, Times, simulate

_IDLE, _GOES_ON = ".", "="
_MOST_COLUMNS = 2.0**53
_MEANING = {
    Kind.F: "F forward",
    Kind.F_PAIRED: "F followed by what it overlaps with",
    Kind.B: "B backward",
    Kind.I: "I input gradient",
    Kind.W: "W weight gradient",
    Kind.GATHER: "G gather",
    Kind.REDUCE: "R reduction",
}
_LETTER = {Kind.GATHER: "G", Kind.REDUCE: "R"}


def draw(run: Schedule | Simulation, *, unit: float | None = None, max_columns: int = 200) -> str:
    """Draw a run as a grid of time and ranks, with microbatch numbers and a legend.

    Gathers and reductions that cost time have a line of their own below that of their rank.

    Args:
        run: A simulation, or a schedule, which is then simulated at F = I = W = 1, B = 2.
        unit: Time of one column; None for the length of the shortest action.
        max_columns: Where to cut a long run; a cut is said in the drawing.

    Raises:
        ScheduleError: The schedule does not verify; a unit or a width that is not positive.
    """
    simulation = simulate(run) if isinstance(run, Schedule) else run
    lengths = simulation.ends - simulation.starts
    column = float(lengths[lengths > 0].min()) if unit is None else unit
    if not (column > 0 and np.isfinite(column)):
        raise ScheduleError(f"unit must be positive, got {unit}")
    if max_columns < 1:
        raise ScheduleError(f"max_columns must be at least 1, got {max_columns}")
    shown, columns, hidden = _lines(simulation, column, max_columns)
    width = max(len(cell) for _, cells in shown for cell in cells)
    indent = max(len(label) for label, _ in shown)
    lines = [
        f"{label:<{indent}} | " + " ".join(cell.ljust(width) for cell in cells).rstrip()
        for label, cells in shown
    ]
    notes = [_legend(simulation, column)]
    if hidden:
        notes.append(f"{hidden} actions shorter than a column are not shown")
    if columns > max_columns:
        notes.append(f"{columns - max_columns} more columns are not shown")
    return "\n".join([headline(simulation), *lines, *notes])


def _lines(
    simulation: Simulation, unit: float, most: int
) -> tuple[list[tuple[str, list[str]]], int, int]:
    """For each line its label and the text of the columns shown; all columns; actions hidden."""
    moves = simulation.moves
    runs = [simulation] if moves is None else [simulation, moves]
    origin = min(float(run.starts.min()) for run in runs)
    grids = [_grid(run, unit, origin, most) for run in runs]
    ranks = [f"rank {rank}" for rank in range(simulation.schedule.num_ranks)]
    lines = list(zip(ranks, grids[0][0], strict=True))
    if moves is not None:
        pairs = zip(lines, grids[1][0], strict=True)
        lines = [line for own, below in pairs for line in (own, ("", below))]
    shown = max(len(cells) for _, cells in lines)
    padded = [(label, cells + [_IDLE] * (shown - len(cells))) for label, cells in lines]
    return padded, max(columns for _, columns, _ in grids), sum(hidden for _, _, hidden in grids)


def _grid(
    simulation: Simulation, unit: float, origin: float, most: int
) -> tuple[list[list[str]], int, int]:
    """For each rank the text of the columns shown; all columns; actions that found no column."""
    schedule = simulation.schedule
    first = _columns(simulation.starts - origin, unit)
    last = np.maximum(_columns(simulation.ends - origin, unit), first + 1)
    columns = int(last.max())
    shown = min(columns, most)
    grid = [[_IDLE] * shown for _ in schedule.actions]
    free = [0] * schedule.num_ranks
    hidden = 0
    for row, (rank, action) in enumerate(schedule):
        begin, end = int(first[row]), int(last[row])
        if begin < free[rank]:
            hidden += 1
            continue
        free[rank] = end
        if begin < shown:
            going_on = min(end, shown) - begin - 1
            grid[rank][begin : begin + 1 + going_on] = [
                _name(schedule, action),
                *[_GOES_ON] * going_on,
            ]
    return grid, columns, hidden


def _columns(times: Times, unit: float) -> NDArray[np.int64]:
    # Halves always go up: two starts one column apart must not round to the same column.
    return np.minimum(np.floor(times / unit + 0.5), _MOST_COLUMNS).astype(np.int64)


def _name(schedule: Schedule, action: Action) -> str:
    if action.kind == Kind.F_PAIRED:
        action = attrs.evolve(action, kind=Kind.F)
    if action.kind in _LETTER:
        return f"{_LETTER[action.kind]}{action.stage}"
    if _has_several_stages_a_rank(schedule):
        return str(action)
    return f"{action.kind.name}{action.microbatch}"


def _has_several_stages_a_rank(schedule: Schedule) -> bool:
    return len(set(schedule.rank_of_stage)) < schedule.num_stages


def _legend(simulation: Simulation, unit: float) -> str:
    schedule = simulation.schedule
    kinds = np.unique(schedule.packed[:, 0]).tolist()
    words = ", ".join(_MEANING[Kind(kind)] for kind in kinds)
    numbers = "the number is the microbatch"
    if _has_several_stages_a_rank(schedule):
        numbers = "the stage stands before the letter, the microbatch behind it"
    if simulation.moves is not None:
        moved = np.unique(simulation.moves.schedule.packed[:, 0]).tolist()
        words += "; below, of a stage, " + ", ".join(_MEANING[Kind(kind)] for kind in moved)
    return f"{words}; {numbers}; {_GOES_ON} goes on, {_IDLE} idle; a column is {unit:g}"
