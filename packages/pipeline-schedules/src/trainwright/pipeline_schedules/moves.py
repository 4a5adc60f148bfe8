"""Gathers and reductions beside the computation: each rank has one lane for them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import COMPUTE_KINDS, WEIGHT_KINDS, Kind
from trainwright.pipeline_schedules.dependencies import (
    RowNumbers,
    Waits,
    rows_by_stage,
    rows_of_kinds,
)
from trainwright.pipeline_schedules.pairs import pair_rows
from trainwright.pipeline_schedules.schedule import Rows, Schedule

_MOVES = (Kind.GATHER, Kind.REDUCE)


@attrs.frozen(eq=False)
class Lanes:
    """Computations of all ranks and behind them the moves of all ranks, as rows that wait.

    Args:
        moves: GATHER and REDUCE of each rank, in order.
        offsets: Where each lane's rows begin: ``[2 ranks + 1]``.
        waits: What each row waits for, ``needs`` counting over all lanes.
    """

    moves: Schedule
    offsets: NDArray[np.int64]
    waits: tuple[Waits, ...]


def only_moves(schedule: Schedule) -> Schedule:
    """The same schedule with nothing but GATHER and REDUCE."""
    actions: list[Rows] = [rows[rows_of_kinds(rows, _MOVES)] for rows in schedule.actions]
    return attrs.evolve(schedule, actions=actions)


def beside_computation(lowered: Schedule, computing: Schedule, needed: Sequence[Waits]) -> Lanes:
    """Let a move start when what stands before it has been computed, and its lane is free.

    A computation that reads weights waits for the gather of its stage that stands before it; no
    computation waits for a reduction.

    Args:
        lowered: The schedule, verified.
        computing: Its computations alone.
        needed: What these wait for among themselves.
    """
    moves = only_moves(lowered)
    total = computing.num_actions + moves.num_actions
    offsets = np.concatenate([computing.offsets, computing.num_actions + moves.offsets[1:]])
    row_of = _lane_rows(lowered, computing.num_actions, total)
    needs = np.full(total, total, dtype=np.int32)
    _fill_gathers(needs, lowered, row_of)
    _fill_computed_before(needs, lowered, computing, row_of)
    among = [_widen(wait, computing.num_actions, total) for wait in needed]
    return Lanes(moves, offsets, (*among, Waits(needs)))


def _lane_rows(lowered: Schedule, computations: int, total: int) -> NDArray[np.int64]:
    """For each row of the lowered schedule its row in the lanes, ``total`` where it has none."""
    rows = lowered.packed
    row_of = np.full(lowered.num_actions, total, dtype=np.int64)
    row_of[rows_of_kinds(rows, COMPUTE_KINDS)] = np.arange(computations)
    row_of[rows_of_kinds(rows, _MOVES)] = np.arange(computations, total)
    return row_of


def _fill_gathers(needs: RowNumbers, lowered: Schedule, row_of: NDArray[np.int64]) -> None:
    chosen, bounds = rows_by_stage(lowered, (Kind.GATHER, *WEIGHT_KINDS))
    is_gather = lowered.packed[chosen, 0] == Kind.GATHER
    latest = np.maximum.accumulate(np.where(is_gather, np.arange(len(chosen)), -1))
    inside = latest >= np.repeat(bounds[:-1], np.diff(bounds))
    reads = inside & ~is_gather
    needs[row_of[chosen[reads]]] = row_of[chosen[latest[reads]]]
    # A pair waits for both; the lane gathers in order, so for the later one of the two.
    forwards = row_of[pair_rows(lowered)]
    gathered = np.where(needs == len(needs), -1, needs)
    later = np.maximum(gathered[forwards], gathered[forwards + 1])
    needs[forwards] = np.where(later < 0, len(needs), later)


def _fill_computed_before(
    needs: RowNumbers, lowered: Schedule, computing: Schedule, row_of: NDArray[np.int64]
) -> None:
    rows = lowered.packed
    computed = rows_of_kinds(rows, COMPUTE_KINDS)
    latest = np.maximum.accumulate(np.where(computed, row_of, -1))
    first_of_rank = np.repeat(computing.offsets[:-1], np.diff(lowered.offsets))
    waiting = np.flatnonzero(rows_of_kinds(rows, _MOVES) & (latest >= first_of_rank))
    needs[row_of[waiting]] = latest[waiting]


def _widen(wait: Waits, computations: int, total: int) -> Waits:
    needs = np.full(total, total, dtype=np.int32)
    needs[:computations] = np.where(wait.needs == computations, total, wait.needs)
    if wait.delay is None:
        return Waits(needs)
    return Waits(needs, np.concatenate([wait.delay, np.zeros(total - computations)]))
