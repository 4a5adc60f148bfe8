"""Whether weights are there whenever they are read, and gradients reduced where they belong."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainwright.pipeline_schedules.actions import WEIGHT_KINDS, Action, Kind
from trainwright.pipeline_schedules.completeness import placed
from trainwright.pipeline_schedules.dependencies import rows_by_stage, rows_of_kinds
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.pairs import pair_rows
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.weight_plan import WeightPlan
from trainwright.pipeline_schedules.weight_traffic import peak_live, weight_counts


def check_stays(schedule: Schedule) -> None:
    """GATHER and RELEASE of a stage alternate, and what reads its weights stands between them.

    A stage without any GATHER or RELEASE has its weights whole all the time.
    """
    if not rows_of_kinds(schedule.packed, (Kind.GATHER, Kind.RELEASE)).any():
        return
    chosen, bounds = rows_by_stage(schedule, (Kind.GATHER, Kind.RELEASE, *WEIGHT_KINDS))
    kinds = schedule.packed[chosen, 0]
    change = (kinds == Kind.GATHER).astype(np.int64) - (kinds == Kind.RELEASE)
    total = np.concatenate([[0], np.cumsum(change)])
    sizes = np.diff(bounds)
    before = total[:-1] - np.repeat(total[bounds[:-1]], sizes)
    moves = np.concatenate([[0], np.cumsum(change != 0)])
    sharded = np.repeat(np.diff(moves[bounds]) > 0, sizes)
    # A GATHER finds nothing gathered; a RELEASE, and what reads, finds one GATHER open.
    wrong = np.flatnonzero(sharded & (before != (kinds != Kind.GATHER)))
    if len(wrong):
        raise _out_of_turn(schedule, chosen, int(wrong[0]))
    open_stages = np.flatnonzero(np.diff(total[bounds]) != 0)
    if len(open_stages):
        stage = int(open_stages[0])
        own = chosen[bounds[stage] : bounds[stage + 1]]
        last = own[schedule.packed[own, 0] == Kind.GATHER][-1]
        rank, action = placed(schedule, last)
        raise ScheduleError(
            f"{action} on rank {rank} is never released: {Action(Kind.RELEASE, stage)} must stand "
            "behind the last action that reads its weights",
            [(rank, action)],
        )


def _out_of_turn(schedule: Schedule, chosen: NDArray[np.int64], place: int) -> ScheduleError:
    rank, action = placed(schedule, chosen[place])
    gather, release = Action(Kind.GATHER, action.stage), Action(Kind.RELEASE, action.stage)
    places = [(rank, action)]
    if action.kind == Kind.GATHER:
        earlier = placed(schedule, chosen[place - 1])[1]
        reason = f"gathers what is gathered already: {release} must stand between it and {earlier}"
    elif action.kind == Kind.RELEASE:
        reason = f"releases what is not gathered: {gather} must stand before it"
    else:
        reason = "reads weights that are not gathered: it must stand between"
        reason += f" {gather} and {release}"
    return ScheduleError(f"{action} on rank {rank} {reason}", places)


def check_reductions_apart(schedule: Schedule) -> None:
    """Where every backward is reduced, its REDUCE stands before the next weight gradient.

    That a REDUCE stands behind the gradients it reduces is a matter of order (`check_ordered`).
    """
    reductions, bounds = rows_by_stage(schedule, (Kind.REDUCE,))
    several = np.flatnonzero(np.diff(bounds) > 1).tolist()
    if not several:
        return
    gradients, firsts = rows_by_stage(schedule, (Kind.B, Kind.W))
    for stage in several:
        # As many of the one as of the other: anything else was refused before.
        ours = reductions[bounds[stage] : bounds[stage + 1]][:-1]
        following = gradients[firsts[stage] : firsts[stage + 1]][1:]
        late = np.flatnonzero(ours > following)
        if len(late):
            rank, reduction = placed(schedule, ours[late[0]])
            _, gradient = placed(schedule, following[late[0]])
            raise ScheduleError(
                f"{reduction} number {late[0]} on rank {rank} stands behind {gradient}: where "
                "every backward is reduced, each must be before the next one begins",
                [(rank, reduction), (rank, gradient)],
            )


def check_plan(schedule: Schedule, plan: WeightPlan) -> None:
    """A lowered schedule gathers and reduces as the plan promises."""
    gathers, reductions = weight_counts(schedule)
    _check_gathers(schedule, plan, gathers)
    if not schedule.forward_only:
        wanted = schedule.num_microbatches if plan.reduce_each_backward else 1
        for stage in np.flatnonzero(reductions != wanted).tolist():
            raise ScheduleError(
                f"{Action(Kind.REDUCE, stage)} stands {reductions[stage]} times on rank "
                f"{schedule.rank_of_stage[stage]}, the weight plan promises {wanted}"
            )
    if plan.keep is None:
        return
    live, most = peak_live(schedule), np.maximum(plan.keep, _read_at_once(schedule))
    for rank in np.flatnonzero(live > most).tolist():
        raise ScheduleError(
            f"rank {rank} has up to {live[rank]} chunks gathered at once, the weight plan allows "
            f"{most[rank]}"
        )


def _shared_reads(schedule: Schedule) -> NDArray[np.int64]:
    """How often a pair reads the same stage twice, by stage: it is gathered once for both."""
    forwards = pair_rows(schedule)
    stages = schedule.packed[:, 1]
    same = forwards[stages[forwards] == stages[forwards + 1]]
    return np.bincount(stages[same], minlength=schedule.num_stages)


def _read_at_once(schedule: Schedule) -> NDArray[np.int64]:
    """The most stages that one action of each rank reads: 1, or 2 where it has a pair of two."""
    forwards = pair_rows(schedule)
    stages = schedule.packed[:, 1]
    two = forwards[stages[forwards] != stages[forwards + 1]]
    most = np.ones(schedule.num_ranks, dtype=np.int64)
    most[np.searchsorted(schedule.offsets, two, side="right") - 1] = 2
    return most


def _check_gathers(schedule: Schedule, plan: WeightPlan, gathers: NDArray[np.int64]) -> None:
    promised = np.zeros(schedule.num_stages, dtype=np.bool_)
    promised[list(plan.stages_in(schedule))] = True
    for stage in np.flatnonzero((gathers > 0) != promised).tolist():
        rule = "must be gathered" if promised[stage] else "must not be gathered"
        raise ScheduleError(
            f"{Action(Kind.GATHER, stage)} stands {gathers[stage]} times on rank "
            f"{schedule.rank_of_stage[stage]}; by the weight plan the stage {rule}"
        )
    _, bounds = rows_by_stage(schedule, WEIGHT_KINDS)
    wanted = np.ones_like(gathers)
    if plan.keep == 0:
        wanted = np.diff(bounds) - _shared_reads(schedule)
    if plan.keep is not None and plan.keep > 0:
        return
    for stage in np.flatnonzero(promised & (gathers != wanted)).tolist():
        raise ScheduleError(
            f"{Action(Kind.GATHER, stage)} stands {gathers[stage]} times on rank "
            f"{schedule.rank_of_stage[stage]}, the weight plan promises {wanted[stage]}"
        )
