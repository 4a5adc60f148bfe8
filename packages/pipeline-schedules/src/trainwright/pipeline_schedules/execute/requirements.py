"""What an executor refuses before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainwright.pipeline_schedules.execute.boundary import Skip
from trainwright.pipeline_schedules.execute.errors import PipelineError
from trainwright.pipeline_schedules.execute.program import gathered_stages
from trainwright.pipeline_schedules.execute.protocol import Transport, WeightKeeper
from trainwright.pipeline_schedules.schedule import Schedule


def require_fit(
    schedule: Schedule,
    stages: Mapping[int, torch.nn.Module],
    transport: Transport,
) -> None:
    """Refuse a schedule for other ranks, or other stages.

    Raises:
        PipelineError: It does not fit.
    """
    if transport.size != schedule.num_ranks:
        raise PipelineError(
            f"the schedule is for {schedule.num_ranks} ranks but the transport has "
            f"{transport.size}; make the schedule for {transport.size} ranks"
        )
    own = schedule.stages_of(transport.rank)
    if set(stages) != set(own):
        raise PipelineError(
            f"rank {transport.rank} of the pipeline owns stages {list(own)} by the schedule, "
            f"got modules for stages {sorted(stages)}"
        )


def require_own(
    schedule: Schedule, transport: Transport, name: str, given: Mapping[int, object]
) -> None:
    """Refuse what is given for stages of other ranks.

    Raises:
        PipelineError: It is.
    """
    own = schedule.stages_of(transport.rank)
    foreign = sorted(set(given) - set(own))
    if foreign:
        raise PipelineError(
            f"{name} are given for stages {foreign}, but rank {transport.rank} of the pipeline "
            f"owns stages {list(own)}"
        )


def require_gathered(
    schedule: Schedule, transport: Transport, weights: Mapping[int, WeightKeeper]
) -> None:
    """Refuse a lowered schedule that gathers other stages than those that have weights.

    Raises:
        PipelineError: It does.
    """
    own = set(schedule.stages_of(transport.rank))
    gathered = sorted(own.intersection(gathered_stages(schedule)))
    if gathered != sorted(weights):
        raise PipelineError(
            f"the lowered schedule gathers stages {gathered} of rank {transport.rank} of the "
            f"pipeline, but weights are given for stages {sorted(weights)}; lower it with a "
            f"WeightPlan of the stages that have weights"
        )


def require_skips(skips: tuple[Skip, ...], num_stages: int) -> None:
    """Refuse skips that do not fit the stages.

    Raises:
        PipelineError: A skip starts or ends at no stage.
    """
    for skip in skips:
        if skip.target >= num_stages:
            raise PipelineError(
                f"skip {skip.name} ends at stage {skip.target}, but the schedule has stages 0 to "
                f"{num_stages - 1}"
            )
