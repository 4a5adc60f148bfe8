"""How sharded weights come and go in a step: what lowering follows and verifying holds to."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.schedule import Schedule


def _stages(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(sorted({int(value) for value in values}))


@attrs.frozen
class WeightPlan:
    """When the weights that data-parallel ranks share out are whole, and when gradients are added.

    A chunk is the weights of one stage. With Φ elements, g gathers and r reductions a step, a rank
    moves gΦ + rΦ (times (N-1)/N for a ring of N data-parallel ranks); `weight_traffic` counts g
    and r of a lowered schedule.

    Args:
        stages: The stages whose weights are gathered and released; None for all, ``()`` for none.
        keep: How many chunks of a rank may stay gathered from one of its actions to the next.
            None: all of them, each from its first F to its last action that reads weights; g = 1.
            A number k from 1: at most k at once; a chunk makes room for the next one when its own
            next use is the farthest away, and is gathered anew for that; 1 ≤ g ≤ 2m. 0: none, each
            F and each B or I gathers for itself; g = 2m, less where a pair reads one chunk twice.
            A chunk is gathered while the action before its first one runs, except where k leaves
            no room for that. What one action reads always has room: two chunks of a pair.
        reduce_each_backward: Reduce gradients after every backward, so that what accumulates is
            this rank's part (r = m), instead of once after the last (r = 1). For all stages.

    F, B and I read weights. W does not: it multiplies what I left, and where activations are
    recomputed, I does that.

    Raises:
        ScheduleError: A negative stage or number.
    """

    stages: tuple[int, ...] | None = attrs.field(default=None, converter=_stages)
    keep: int | None = None
    reduce_each_backward: bool = False

    def __attrs_post_init__(self) -> None:
        if self.stages and self.stages[0] < 0:
            raise ScheduleError(f"stages must be numbers from 0, got {list(self.stages)}")
        if self.keep is not None and self.keep < 0:
            raise ScheduleError(f"keep must be None or a number of chunks from 0, got {self.keep}")

    def stages_in(self, schedule: Schedule) -> tuple[int, ...]:
        """The stages of a schedule whose weights are gathered.

        Raises:
            ScheduleError: The plan names a stage that the schedule does not have.
        """
        if self.stages is None:
            return tuple(range(schedule.num_stages))
        if self.stages and self.stages[-1] >= schedule.num_stages:
            raise ScheduleError(
                f"the weight plan names stage {self.stages[-1]}, but the schedule has stages 0 to "
                f"{schedule.num_stages - 1}"
            )
        return self.stages
