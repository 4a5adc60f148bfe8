"""The parts of a training run, each from its own library, chosen once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.integration.balancing import ExpertBalance
from trainwright.integration.chunks import Chunks
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Data
from trainwright.integration.feed import Feed
from trainwright.integration.fitting import check_fits, fitting_guards
from trainwright.integration.guarding import GuardPlan
from trainwright.integration.head_clipping import HeadClipping
from trainwright.integration.hugging_face import load_
from trainwright.integration.model import ModelShape
from trainwright.integration.numerics import (
    ProductScales,
    choose_scaler,
    give_float8,
)
from trainwright.integration.optimizers import Factory, JoinedOptimizer, OptimizerPlan
from trainwright.integration.rates import decay_mover, learning_rate
from trainwright.integration.sharded import build_stages, shard_model
from trainwright.integration.signals import Signals
from trainwright.integration.stateful import Stateful
from trainwright.integration.stepping import (
    build_executor,
    build_feed,
    build_optimizer,
    executors_by_count,
    make_schedule,
)
from trainwright.integration.stopping import NeverStop, Stop
from trainwright.integration.vocabulary import check_vocabulary, shape_for
from trainwright.pipeline_schedules.execute import PipelineExecutor
from trainwright.precision import LossScaler
from trainwright.sharding import Mesh
from trainwright.stability_guards import Journal, MemoryJournal


@attrs.define
class Progress:
    """How far a run has come; what of it a checkpoint holds beside tensors.

    Args:
        step: batches consumed, but for those that a rollback has left out.
        updates: updates applied.
        skipped: batches whose update was skipped.
        in_a_row: batches whose update was skipped since the last one that was applied, in this
            process.
        guard_state: what the recovery remembers, plain data; empty before the first step.
    """

    guard_state: Mapping[str, Any] = attrs.field(factory=dict)
    step: int = 0
    updates: int = 0
    skipped: int = 0
    in_a_row: int = 0

    def end(self, steps: int) -> int:
        """Return the number of the step with which a run ends, if no more are skipped.

        Args:
            steps: updates that the run makes.
        """
        return self.step + steps - self.updates


@attrs.frozen(eq=False)
class Parts:
    """What the recipe needs, on this rank.

    Args:
        counts_tokens: 1.0 on the rank of the last stage, whose token counts enter the global sums,
            else 0.0: earlier stages see the same tokens.
        executor: runs the pipeline, for a whole batch.
        executor_of: the same for a number of microbatches.
        learning_rate: of the update with a number.
        move_decay: sets the weight decay of the update with a number.
        guards: what watches the steps.
        signals: what guards are told of the model.
        journal: of what was done about what they saw, the same on every rank.
        scaler: what the losses are multiplied by before the backward pass.
        scales: of the FP8 products.
        balance: of the experts, by biases.
        heads: of attention, clipped where their logits grow.
        stop: whether the run ends before its last step.
        own: what else of yours is in checkpoints, by name: a schedule, a loss scaler; with the same
            state on every rank.
        generators: random generators of yours in checkpoints, of which each rank has its own.
    """

    config: RunConfig
    mesh: Mesh
    model: Chunks
    executor: PipelineExecutor
    executor_of: Callable[[int], PipelineExecutor]
    optimizer: JoinedOptimizer
    learning_rate: Callable[[int], float]
    move_decay: Callable[[int], None]
    guards: GuardPlan
    signals: Signals
    journal: Journal
    feed: Feed
    counts_tokens: float
    scaler: LossScaler
    scales: ProductScales
    balance: ExpertBalance
    heads: HeadClipping
    stop: Stop = attrs.field(factory=NeverStop)
    own: Mapping[str, Stateful] = attrs.field(factory=dict)
    generators: Mapping[str, torch.Generator] = attrs.field(factory=dict)

    @property
    def steps(self) -> int:
        """Updates that the run makes."""
        return self.config.steps

    @property
    def clip(self) -> float:
        """Largest gradient norm, infinite where gradients stay as they are."""
        return self.config.optimizer.clip or math.inf

    def is_measured(self, step: int) -> bool:
        """Whether the ranks are measured at a step; on every rank alike."""
        return self.config.watching.is_measured(step, self.steps)

    def start(self) -> Progress:
        """Take up the weights that the run begins with; return the progress of one that has not.

        Drawn ones are there already. Those of a folder are read.

        Raises:
            ConfigError, CheckpointingError: the folder's weights are not those of the model, or
                cannot be read; on every rank.

        Communicates: what `load_` does.
        """
        folder = self.config.model.weights
        if folder is not None:
            loaded = load_(self.model, self.config.model.shape, folder, self.mesh.world)
            if self.mesh.world.rank == 0:
                sys.stderr.write(f"{folder}: {loaded}\n")
        return Progress()


def assemble(
    config: RunConfig,
    world: Communicator,
    corpus: Data,
    shape: ModelShape | None = None,
    journal: Journal | None = None,
    *,
    optimizer: Factory | OptimizerPlan | None = None,
    stop: Stop | None = None,
) -> Parts:
    """Build every part of a run on this rank; all ranks call it together.

    Args:
        config: the settings.
        world: all ranks of the run.
        corpus: the data, the same on every rank.
        shape: sizes of the model; None takes those of ``config.model``.
        journal: of interventions; None takes one that ends with the process.
        optimizer: a function of parameter groups that returns an optimizer of ``torch.optim``, or a
            plan that says what another one has to see; None takes that of the settings. The
            learning rate is the settings', of which each group that the function makes keeps the
            share that it gave it; so is the weight decay where they say one.
        stop: whether the run ends before its last step; None makes all updates.

    Raises:
        ConfigError, DataError: settings, data and world do not fit, before any communication.

    Communicates: the splits of the mesh, and what `build_optimizer` does.
    """
    shape = shape or shape_for(config, corpus.tokenizer.vocabulary)
    shape = config.model.applied(shape)
    check_vocabulary(shape, corpus.tokenizer.vocabulary, config.model.model)
    check_fits(shape, config)
    plan = fitting_guards(shape, config)
    mesh = Mesh(world, config.parallel.mesh)
    schedule = make_schedule(config)
    stages = build_stages(config, shape, mesh, schedule)
    scales = give_float8(config, mesh, stages.values())
    model = shard_model(config, shape, mesh, stages)
    joined = build_optimizer(config, model, optimizer)
    executor = build_executor(config, shape, mesh, schedule, model)
    heads = HeadClipping(mesh, model, shape, config.guards.qk_clip)
    return Parts(
        config=config,
        mesh=mesh,
        model=model,
        executor=executor,
        executor_of=executors_by_count(config, shape, mesh, model, executor),
        optimizer=joined,
        learning_rate=learning_rate(config.rate, config.optimizer.lr, config.steps),
        move_decay=decay_mover(config, joined),
        guards=plan,
        signals=Signals(mesh, model, joined, plan.signals_every),
        journal=MemoryJournal() if journal is None else journal,
        feed=build_feed(config, mesh, corpus),
        counts_tokens=1.0 if schedule.num_stages - 1 in model.stages else 0.0,
        scaler=choose_scaler(config, model.pieces),
        scales=scales,
        stop=NeverStop() if stop is None else stop,
        heads=heads,
        balance=ExpertBalance(mesh, tuple(stages.values()), config.model.expert_bias or 0.0),
    )
