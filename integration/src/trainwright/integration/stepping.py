"""What makes a step on this rank: the schedule and its executor, the feed, the optimizer."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.integration.chunks import Chunks, at_the_end
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Data, Reader
from trainwright.integration.feed import Feed
from trainwright.integration.model import ModelShape
from trainwright.integration.offloading import check_elements
from trainwright.integration.optimizers import (
    Factory,
    JoinedOptimizer,
    OptimizerPlan,
    Options,
    adamw,
    build,
    offloaded,
    plan_of,
)
from trainwright.integration.ramping import RampedFeed, ramped_sizes
from trainwright.integration.sharded import gathers_stages, sequence_part
from trainwright.pipeline_schedules import GENERATORS, Schedule, WeightPlan, lower
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec
from trainwright.precision import policy
from trainwright.sharding import Mesh
from trainwright.sharding.tensor import Cut


def make_schedule(config: RunConfig, microbatches: int | None = None) -> Schedule:
    """Return what every rank of the pipeline does in a step of so many microbatches."""
    chosen, count = GENERATORS[config.parallel.schedule], microbatches or config.sizes.microbatches
    return chosen.make(config.parallel.mesh.pp, count, config.parallel.chunks)


def build_executor(
    config: RunConfig, shape: ModelShape, mesh: Mesh, schedule: Schedule, model: Chunks
) -> PipelineExecutor:
    """Build what runs the schedule on this rank's stages."""
    parallel = config.parallel
    # Stages hand on the residual stream of one microbatch.
    handed_on = TensorSpec(
        (config.sizes.micro_batch, local_positions(config, mesh), shape.width),
        policy(config.dtype).compute,
    )
    by_schedule = gathers_stages(config)
    plan = WeightPlan(
        stages=None if by_schedule else (),
        keep=0 if parallel.gather == "action" else None,
        # Where hooks gather they also end each backward with its reductions.
        reduce_each_backward=parallel.reduce == "microbatch" and (by_schedule or parallel.zero < 3),
    )
    return PipelineExecutor(
        lower(schedule, plan),
        model.stages,
        mesh.communicator("pp"),
        loss=model.stages[max(model.stages)].loss,
        reducers=model.parallel if parallel.overlap else at_the_end(model.parallel),
        weights=model.parallel if by_schedule else {},
        boundary=BoundarySpec.uniform(schedule.num_stages, handed_on),
    )


def executors_by_count(
    config: RunConfig, shape: ModelShape, mesh: Mesh, model: Chunks, usual: PipelineExecutor
) -> Callable[[int], PipelineExecutor]:
    """Return what gives the executor of a number of microbatches, which is made once and kept.

    Args:
        config: the settings.
        shape: the model's.
        mesh: all ranks.
        model: this rank's stages.
        usual: the executor of the whole batch.
    """
    made = {config.sizes.microbatches: usual}

    def executor_of(count: int) -> PipelineExecutor:
        if count not in made:
            schedule = make_schedule(config, count)
            made[count] = build_executor(config, shape, mesh, schedule, model)
        return made[count]

    return executor_of


def local_positions(config: RunConfig, mesh: Mesh) -> int:
    """Return how many positions of the residual stream this rank has between products."""
    positions = sequence_part(config, mesh).length
    if not config.parallel.sequence_parallel:
        return positions
    return Cut.uneven(positions, mesh.size("tp")).numel(mesh.coordinate("tp"))


def build_feed(config: RunConfig, mesh: Mesh, data: Data) -> Feed:
    """Build the reader of this rank's share of each global batch: its sequences, its positions."""
    reader = Reader(
        data.samples(config.batch.sequence_length, config.seed),
        config.sizes.global_batch,
        microbatches=config.sizes.microbatches,
        data_rank=mesh.coordinate("dp"),
        data_size=config.parallel.mesh.dp,
        device=mesh.world.device,
    )
    ranks, part = mesh.communicator("dp", "cp"), sequence_part(config, mesh)
    ahead = config.data.read_ahead
    if config.batch.ramp_from is None:
        return Feed(reader, ranks, part, ahead=ahead)
    return RampedFeed(reader, ranks, part, sizes=ramped_sizes(config), ahead=ahead)


def build_optimizer(
    config: RunConfig, model: Chunks, chosen: Factory | OptimizerPlan | None = None
) -> JoinedOptimizer:
    """Build the optimizer over the pieces of this rank; weights of two and more dims decay.

    Args:
        config: the settings.
        model: whose weights.
        chosen: an optimizer of yours in place of that of the settings.

    Raises:
        ConfigError: states are offloaded, and an optimizer of yours has to see whole parameters.

    Communicates: what `optimizers.build` does.
    """
    settings = config.optimizer
    models = dict.fromkeys(model.parallel.values())
    if chosen is None:
        made = build(settings.plan, models, lr=settings.lr, weight_decay=settings.decay)
        return offloaded(made, models, model.offload)
    plan = chosen if isinstance(chosen, OptimizerPlan) else plan_of(chosen, adamw(Options()))
    if model.offload is not None:
        check_elements(config.parallel.offload, plan, "the optimizer of yours")
    made = build(plan, models, lr=settings.lr, weight_decay=settings.weight_decay)
    return offloaded(made, models, model.offload)
