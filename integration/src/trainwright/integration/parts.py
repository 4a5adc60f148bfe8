"""The parts of a training run, each from its own library, chosen once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from trainwright.checkpointing.activations import parse_policy
from trainwright.collectives import Communicator
from trainwright.integration.chunks import Chunks, join, tie
from trainwright.integration.config import RunConfig, check_fits
from trainwright.integration.data import Corpus, Reader
from trainwright.integration.feed import Feed
from trainwright.integration.model import (
    Block,
    DecoderStage,
    ModelShape,
    TensorParallelLayers,
    build_stage,
    initializer,
)
from trainwright.integration.stateful import Stateful
from trainwright.pipeline_schedules import (
    GENERATORS,
    Schedule,
    WeightPlan,
    lower,
    split_layers,
)
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec
from trainwright.precision import policy
from trainwright.sharding import Mesh, Partial, placements_of
from trainwright.sharding.data import DataParallel, Piece, ShardPolicy, by_class, data_parallel
from trainwright.sharding.tensor import Cut, SequenceSharding
from trainwright.stability_guards import Guard, NonFiniteGuard, decay_groups, warmup_cosine

EMBEDDING = "model.embed_tokens.weight"

KEEP_FP32 = ("*norm.weight",)
"""Norms stay in at least float32 whatever the dtype of the run."""

BETAS = (0.9, 0.95)
FLOOR_SHARE = 0.1
"""The learning rate falls to this share of its peak."""


@attrs.define
class Progress:
    """How far a run has come; what of it a checkpoint holds beside tensors.

    Args:
        step: batches consumed.
        updates: updates applied.
        skipped: batches whose update was skipped.
        guard_state: the guard's own plain data.
    """

    guard_state: Any
    step: int = 0
    updates: int = 0
    skipped: int = 0


@attrs.frozen(eq=False)
class Parts:
    """What the recipe needs, on this rank.

    Args:
        counts_tokens: 1.0 on the rank of the last stage, whose token counts enter the global sums,
            else 0.0: earlier stages see the same tokens.
        own: what else of yours is in checkpoints, by name: a schedule, a loss scaler; with the same
            state on every rank.
        generators: random generators of yours in checkpoints, of which each rank has its own.
    """

    config: RunConfig
    mesh: Mesh
    model: Chunks
    executor: PipelineExecutor
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    guard: Guard
    feed: Feed
    counts_tokens: float
    own: Mapping[str, Stateful] = attrs.field(factory=dict)
    generators: Mapping[str, torch.Generator] = attrs.field(factory=dict)

    @property
    def steps(self) -> int:
        """Steps that the run makes."""
        return self.config.steps

    @property
    def clip(self) -> float:
        """Largest gradient norm."""
        return self.config.clip

    def start(self) -> Progress:
        """Return the progress of a run that has not begun."""
        return Progress(guard_state=self.guard.initial())


@contextlib.contextmanager
def whole_weights(parts: Parts) -> Iterator[None]:
    """Keep the weights of this rank's stages gathered, where the schedule would gather them."""
    if not gathers_stages(parts.config):
        yield
        return
    parts.model.gather()
    try:
        yield
    finally:
        parts.model.release()


def assemble(
    config: RunConfig,
    world: Communicator,
    corpus: Corpus,
    shape: ModelShape | None = None,
) -> Parts:
    """Build every part of a run on this rank; all ranks call it together.

    Args:
        config: the settings.
        world: all ranks of the run.
        corpus: the data, the same on every rank.
        shape: sizes of the model; None takes those of ``config.model``.

    Raises:
        ConfigError, DataError: settings, data and world do not fit, before any communication.

    Communicates: the splits of the mesh.
    """
    shape = shape or config.shape
    check_fits(shape, config.mesh, config)
    mesh = Mesh(world, config.mesh)
    schedule = make_schedule(config)
    model = shard_model(config, shape, mesh, build_stages(config, shape, mesh, schedule))
    return Parts(
        config=config,
        mesh=mesh,
        model=model,
        executor=build_executor(config, shape, mesh, schedule, model),
        optimizer=build_optimizer(config, model.pieces),
        learning_rate=warmup_cosine(
            config.lr, config.warmup_steps, config.steps, floor=config.lr * FLOOR_SHARE
        ),
        guard=NonFiniteGuard(),
        feed=build_feed(config, mesh, corpus),
        counts_tokens=1.0 if schedule.num_stages - 1 in model.stages else 0.0,
    )


def make_schedule(config: RunConfig) -> Schedule:
    """Return what every rank of the pipeline does in a step."""
    chosen = GENERATORS[config.schedule]
    return chosen.make(config.mesh.pp, config.microbatches, config.chunks)


def build_stages(
    config: RunConfig, shape: ModelShape, mesh: Mesh, schedule: Schedule
) -> dict[int, DecoderStage]:
    """Build this rank's stages in master precision, without memory for their weights yet."""
    blocks = split_layers(shape.layers, schedule.num_stages)
    sequence = None
    if config.sequence_parallel:
        sequence = SequenceSharding.keeping_shards(length=config.sequence_length)
    layers = TensorParallelLayers(mesh.communicator("tp"), sequence)
    policy = parse_policy(config.recompute)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    stages = {}
    with torch.device("meta"):
        for number in schedule.stages_of(mesh.coordinate("pp")):
            stages[number] = build_stage(shape, layers, blocks[number], policy).to(dtype=dtype)
    first, last = 0, schedule.num_stages - 1
    if shape.tied and first < last and {first, last} <= stages.keys():
        tie(stages[first], stages[last])
    return stages


def shard_model(
    config: RunConfig, shape: ModelShape, mesh: Mesh, stages: dict[int, DecoderStage]
) -> Chunks:
    """Initialise stages and share their model states out over the data-parallel ranks."""
    groups = [[number] for number in stages]
    ends = [number for number, stage in stages.items() if stage.is_first or stage.is_last]
    if shape.tied and len(ends) == 2:
        # They share a weight, which is reduced once, after the last of its two uses.
        groups = [ends, *([number] for number in stages if number not in ends)]
    parallel = {}
    for group in groups:
        members = [stages[number] for number in group]
        module = members[0] if len(members) == 1 else join(members)
        model = _shard(config, shape, mesh, module, shares_ends=len(members) == 2)
        parallel.update(dict.fromkeys(group, model))
    return Chunks(stages, {number: parallel[number] for number in stages})


def _shard(
    config: RunConfig, shape: ModelShape, mesh: Mesh, module: nn.Module, *, shares_ends: bool
) -> DataParallel:
    placements = placements_of(module)
    if shape.tied and not shares_ends and mesh.size("pp") > 1 and EMBEDDING in placements:
        # The embedding lies at both ends of the pipeline, which see a part of its gradient each.
        alone = placements[EMBEDDING]
        placements[EMBEDDING] = attrs.evolve(alone, gradient={**alone.gradient, "pp": Partial()})
    dtypes = policy(config.dtype, keep_fp32=KEEP_FP32)
    dtypes.check_patterns(placements)
    return data_parallel(
        module,
        mesh,
        ShardPolicy(
            stage=config.zero,
            units=by_class(Block),
            parameter_dtype=dtypes.parameter_dtype,
            reduce_each_backward=config.reduce == "microbatch",
            # Drawn by place they are equal already; a broadcast would hide it if they were not.
            broadcast_weights=False,
        ),
        placements,
        hooks=config.zero == 3 and not gathers_stages(config),
        initialize=initializer(placements, shape, config.seed),
    )


def gathers_stages(config: RunConfig) -> bool:
    """Whether the schedule gathers weights, a stage at a time, and not hooks, unit by unit."""
    alone = config.gather == "auto" and config.num_stages == 1
    return config.zero == 3 and not alone and config.gather != "unit"


def build_executor(
    config: RunConfig, shape: ModelShape, mesh: Mesh, schedule: Schedule, model: Chunks
) -> PipelineExecutor:
    """Build what runs the schedule on this rank's stages."""
    rows = config.global_batch // (config.mesh.dp * config.microbatches)
    # Stages hand on the residual stream of one microbatch.
    handed_on = TensorSpec(
        (rows, local_positions(config, mesh), shape.width), policy(config.dtype).compute
    )
    by_schedule = gathers_stages(config)
    plan = WeightPlan(
        stages=None if by_schedule else (),
        keep=0 if config.gather == "action" else None,
        # Where hooks gather they also end each backward with its reductions.
        reduce_each_backward=config.reduce == "microbatch" and (by_schedule or config.zero < 3),
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
    if not config.sequence_parallel:
        return config.sequence_length
    return Cut.uneven(config.sequence_length, mesh.size("tp")).numel(mesh.coordinate("tp"))


def build_feed(config: RunConfig, mesh: Mesh, corpus: Corpus) -> Feed:
    """Build the reader of this data rank's share of each global batch."""
    reader = Reader(
        corpus.train,
        config.sequence_length,
        config.global_batch,
        microbatches=config.microbatches,
        seed=config.seed,
        data_rank=mesh.coordinate("dp"),
        data_size=config.mesh.dp,
        device=mesh.world.device,
    )
    return Feed(reader, mesh.communicator("dp", "cp"))


def build_optimizer(config: RunConfig, pieces: dict[str, Piece]) -> torch.optim.Optimizer:
    """Build AdamW over the pieces of this rank; weights of two and more dims decay."""
    groups = decay_groups(
        [(name, piece.parameter) for name, piece in pieces.items()],
        config.weight_decay,
        logical_ndim={name: len(piece.spec.global_shape) for name, piece in pieces.items()},
    )
    return torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, eps=1e-8, fused=True)
