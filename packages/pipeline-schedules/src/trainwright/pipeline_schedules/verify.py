"""Whether a schedule works: complete, ordered, matched, free of deadlock, within memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from trainwright.pipeline_schedules.completeness import check_complete, check_known, check_pairs
from trainwright.pipeline_schedules.deadlock import check_channels, check_ordered, check_runs
from trainwright.pipeline_schedules.dependencies import Waits, waits
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import UNIT_MEMORY, Memory, peak_memory
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.weight_checks import (
    check_plan,
    check_reductions_apart,
    check_stays,
)
from trainwright.pipeline_schedules.weight_plan import WeightPlan

Sends = Literal["rendezvous", "buffered"] | int
"""How a send behaves: it waits for its receive, or never, or while so many messages lie there."""


def verify(
    schedule: Schedule,
    send: Sends = "rendezvous",
    *,
    memory: Memory = UNIT_MEMORY,
    memory_limit: float | Sequence[float] | None = None,
    weights: WeightPlan | None = None,
) -> None:
    """Prove that a schedule works, or raise an error that names the actions and the reason.

    - Known: every action names a stage of its own rank and a microbatch of the step.
    - Complete: each stage has for each microbatch exactly one F and one B (or one I and one W); a
      lowered schedule exactly one send and one receive for each boundary between ranks, and one
      reduction a stage or one for each microbatch.
    - Paired: right below each F_PAIRED stands a B or I, of another microbatch or stage. The two are
      one block: it starts when what either needs is there, and makes what either makes at its end.
    - Ordered: on its rank, an action stands after everything it needs; of several reductions of a
      stage each between its weight gradient and the next.
    - Gathered: GATHER and RELEASE of a stage alternate, every F, B and I of it stands between
      them, and at the end all is released.
    - Matched: between two ranks, messages are received in the order in which they are sent.
    - Free of deadlock: all ranks reach the end. A schedule that is not lowered has no sends; there
      it means that no ranks wait for each other's computations in a circle.
    - Bounded: no rank holds more than its limit.

    Args:
        schedule: Any schedule, also an imported one.
        send: ``"rendezvous"``: a send waits until its receive is reached. ``"buffered"``: a send
            never waits. A number: it waits while so many messages lie in the channel to that rank;
            0 is rendezvous.
        memory: What each stage holds for a microbatch.
        memory_limit: The most a rank may hold, one number or one a rank; None for no limit.
        weights: The plan that a lowered schedule has to follow: which stages are gathered, how
            often, how many at once, and how often each is reduced. None: whatever it does.

    Raises:
        ScheduleError: It does not work; ``places`` holds the ranks and actions concerned.
    """
    capacity = _capacity(send)
    check_runs(schedule, check_all_but_running(schedule), capacity)
    if weights is not None:
        if not schedule.lowered:
            raise ScheduleError("only a lowered schedule can follow a weight plan; lower it first")
        check_plan(schedule, weights)
    if memory_limit is not None:
        _check_memory(schedule, memory, memory_limit)


def check_all_but_running(schedule: Schedule) -> tuple[Waits, Waits]:
    """Everything that `verify` proves besides plan and memory, but that the ranks reach the end.

    Returns:
        What the actions wait for; whoever runs them finds out whether they get stuck.

    Raises:
        ScheduleError: It does not work.
    """
    check_known(schedule)
    check_complete(schedule)
    check_pairs(schedule)
    needed = waits(schedule)
    check_ordered(schedule, needed)
    if schedule.lowered:
        check_channels(schedule)
        check_stays(schedule)
        check_reductions_apart(schedule)
    return needed


def _capacity(send: Sends) -> int | None:
    if send == "rendezvous":
        return 0
    if send == "buffered":
        return None
    if isinstance(send, int) and not isinstance(send, bool) and send >= 0:
        return send
    raise ScheduleError(
        f"send must be 'rendezvous', 'buffered' or a number of messages from 0, got {send!r}"
    )


def _check_memory(schedule: Schedule, memory: Memory, limit: float | Sequence[float]) -> None:
    limits = np.asarray(limit, dtype=np.float64)
    if limits.ndim > 1 or (limits.ndim == 1 and len(limits) != schedule.num_ranks):
        raise ScheduleError(
            f"memory_limit must be one number or one for each of {schedule.num_ranks} ranks, "
            f"got {list(limits.shape)}"
        )
    peaks = peak_memory(schedule, memory)
    # Sums of fractions may exceed by their rounding what they equal.
    over = np.flatnonzero(peaks > limits * (1 + 1e-9))
    if len(over):
        rank = int(over[0])
        allowed = np.broadcast_to(limits, peaks.shape)[rank]
        raise ScheduleError(f"rank {rank} holds up to {peaks[rank]:g}, its limit is {allowed:g}")
