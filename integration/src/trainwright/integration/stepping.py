"""What makes a step on this rank: the schedule and its executor, the feed, the optimizer."""

from __future__ import annotations

import torch

from trainwright.integration.chunks import Chunks
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Corpus, Reader
from trainwright.integration.feed import Feed
from trainwright.integration.model import ModelShape
from trainwright.integration.sharded import gathers_stages, sequence_part
from trainwright.pipeline_schedules import GENERATORS, Schedule, WeightPlan, lower
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec
from trainwright.precision import policy
from trainwright.sharding import Mesh
from trainwright.sharding.data import Piece
from trainwright.sharding.tensor import Cut
from trainwright.stability_guards import decay_groups

BETAS = (0.9, 0.95)


def make_schedule(config: RunConfig) -> Schedule:
    """Return what every rank of the pipeline does in a step."""
    chosen = GENERATORS[config.parallel.schedule]
    return chosen.make(config.parallel.mesh.pp, config.sizes.microbatches, config.parallel.chunks)


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
        reducers=model.parallel,
        weights=model.parallel if by_schedule else {},
        boundary=BoundarySpec.uniform(schedule.num_stages, handed_on),
    )


def local_positions(config: RunConfig, mesh: Mesh) -> int:
    """Return how many positions of the residual stream this rank has between products."""
    positions = sequence_part(config, mesh).length
    if not config.parallel.sequence_parallel:
        return positions
    return Cut.uneven(positions, mesh.size("tp")).numel(mesh.coordinate("tp"))


def build_feed(config: RunConfig, mesh: Mesh, corpus: Corpus) -> Feed:
    """Build the reader of this rank's share of each global batch: its sequences, its positions."""
    reader = Reader(
        corpus.train,
        config.batch.sequence_length,
        config.sizes.global_batch,
        microbatches=config.sizes.microbatches,
        seed=config.seed,
        data_rank=mesh.coordinate("dp"),
        data_size=config.parallel.mesh.dp,
        device=mesh.world.device,
    )
    return Feed(reader, mesh.communicator("dp", "cp"), sequence_part(config, mesh))


def build_optimizer(config: RunConfig, pieces: dict[str, Piece]) -> torch.optim.Optimizer:
    """Build AdamW over the pieces of this rank; weights of two and more dims decay."""
    groups = decay_groups(
        [(name, piece.parameter) for name, piece in pieces.items()],
        config.optimizer.weight_decay,
        logical_ndim={name: len(piece.spec.global_shape) for name, piece in pieces.items()},
    )
    return torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=BETAS, eps=1e-8, fused=True)
