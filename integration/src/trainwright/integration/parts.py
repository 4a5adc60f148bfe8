"""The parts of a training run, each from its own library, chosen once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from trainwright.checkpointing.activations import parse_policy
from trainwright.collectives import Communicator
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
from trainwright.pipeline_schedules import (
    Schedule,
    WeightPlan,
    gpipe,
    lower,
    one_f_one_b,
    sequential,
    split_layers,
)
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec
from trainwright.precision import policy
from trainwright.sharding import Mesh, ParameterPlacement, Partial, placements_of
from trainwright.sharding.data import DataParallel, Piece, ShardPolicy, by_class, data_parallel
from trainwright.sharding.tensor import Cut, SequenceSharding
from trainwright.stability_guards import Guard, NonFiniteGuard, decay_groups, warmup_cosine

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "sequential": sequential,
}

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
        counts_tokens: 1.0 on the stage whose token counts enter the global sums, else 0.0: earlier
            stages see the same tokens.
    """

    config: RunConfig
    mesh: Mesh
    stage: DecoderStage
    model: DataParallel
    executor: PipelineExecutor
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]
    guard: Guard
    feed: Feed
    counts_tokens: float

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
    """Keep the weights of this rank's stage gathered, where the schedule would gather them."""
    if not gathers_stages(parts.config):
        yield
        return
    parts.model.gather()
    parts.model.await_weights()
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
    stage = build_model(config, shape, mesh)
    model = shard_model(config, shape, mesh, stage)
    return Parts(
        config=config,
        mesh=mesh,
        stage=stage,
        model=model,
        executor=build_executor(config, shape, mesh, stage, model),
        optimizer=build_optimizer(config, model.pieces),
        learning_rate=warmup_cosine(
            config.lr, config.warmup_steps, config.steps, floor=config.lr * FLOOR_SHARE
        ),
        guard=NonFiniteGuard(),
        feed=build_feed(config, mesh, corpus),
        counts_tokens=1.0 if stage.is_last else 0.0,
    )


def place_parameters(stage: DecoderStage, mesh: Mesh) -> dict[str, ParameterPlacement]:
    """Return where each parameter of a stage lies.

    A tied embedding lies on the first and on the last stage, each of which sees a part of its
    gradient.
    """
    placements = placements_of(stage)
    if stage.shape.tied and mesh.size("pp") > 1 and EMBEDDING in placements:
        alone = placements[EMBEDDING]
        placements[EMBEDDING] = attrs.evolve(alone, gradient={**alone.gradient, "pp": Partial()})
    return placements


def shard_model(
    config: RunConfig, shape: ModelShape, mesh: Mesh, stage: DecoderStage
) -> DataParallel:
    """Initialise a stage and share its model states out over the data-parallel ranks."""
    placements = place_parameters(stage, mesh)
    dtypes = policy(config.dtype, keep_fp32=KEEP_FP32)
    dtypes.check_patterns(placements)
    return data_parallel(
        stage,
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
    alone = config.gather == "auto" and config.mesh.pp == 1
    return config.zero == 3 and not alone and config.gather != "unit"


def build_model(config: RunConfig, shape: ModelShape, mesh: Mesh) -> DecoderStage:
    """Build this rank's stage in master precision, without memory for its weights yet."""
    blocks = split_layers(shape.layers, mesh.size("pp"))[mesh.coordinate("pp")]
    sequence = None
    if config.sequence_parallel:
        sequence = SequenceSharding.keeping_shards(length=config.sequence_length)
    with torch.device("meta"):
        stage = build_stage(
            shape,
            TensorParallelLayers(mesh.communicator("tp"), sequence),
            blocks,
            parse_policy(config.recompute),
        )
    return stage.to(dtype=torch.float64 if config.dtype == "float64" else torch.float32)


def build_executor(
    config: RunConfig, shape: ModelShape, mesh: Mesh, stage: DecoderStage, model: DataParallel
) -> PipelineExecutor:
    """Build what runs the schedule on this rank's stage."""
    index = mesh.coordinate("pp")
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
        lower(SCHEDULES[config.schedule](config.mesh.pp, config.microbatches), plan),
        {index: stage},
        mesh.communicator("pp"),
        loss=stage.loss,
        reducers={index: model},
        weights={index: model} if by_schedule else {},
        boundary=BoundarySpec.uniform(config.mesh.pp, handed_on),
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
