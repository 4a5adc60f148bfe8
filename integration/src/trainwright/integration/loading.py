"""A model that is looked at: its weights from a run's checkpoint, in any layout, nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from trainwright.checkpointing.state import Sharded, StateStore
from trainwright.collectives import Communicator, broadcast_object
from trainwright.integration.balancing import ExpertBalance
from trainwright.integration.chunks import Chunks
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import RunFolderError
from trainwright.integration.fitting import check_fits
from trainwright.integration.model import ModelShape
from trainwright.integration.run_folder import JOURNAL, RunFolder
from trainwright.integration.sharded import build_stages, shard_model
from trainwright.integration.stepping import build_executor, make_schedule
from trainwright.pipeline_schedules.execute import PipelineExecutor
from trainwright.sharding import Mesh
from trainwright.stability_guards import AbandonedStateError, check_not_abandoned, shared_journal

ROWS = 8
"""Sequences that a data rank evaluates at once, where nobody says otherwise."""

KEPT = ("model", "data", "evaluation")
"""Sections of a run's settings that say what its model is and reads."""


@attrs.frozen(eq=False)
class StandingModel:
    """The parts that hold the weights of a model that is not trained, on this rank.

    Args:
        counts_tokens: 1.0 on the ranks of the last stage, else 0.0.
    """

    config: RunConfig
    mesh: Mesh
    model: Chunks
    executor: PipelineExecutor
    counts_tokens: float


def standing_settings(stored: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """Return the settings with which a run's model is looked at.

    What the model is and reads stays. How it was shared out, cut into batches and watched does not:
    it is looked at in a layout of its own. Models that were trained with FP8 products compute in
    bfloat16.

    Args:
        stored: the settings of the run.
        given: leaves that a person asks for.

    Raises:
        ConfigError: a leaf is not allowed.
    """
    config = attrs.evolve(RunConfig(), **{name: getattr(stored, name) for name in KEPT})
    dtype = "bfloat16" if stored.dtype.startswith("fp8") else stored.dtype
    leaves = {"sequence_length": stored.batch.sequence_length, "seed": stored.seed, "dtype": dtype}
    return config.evolve(**{"micro_batch": ROWS, "microbatches": 1, **leaves, **given})


def assemble_model(config: RunConfig, world: Communicator, shape: ModelShape) -> StandingModel:
    """Build a model on this rank, whose weights are yet to be loaded; all ranks call it together.

    Raises:
        ConfigError: settings, model and world do not fit, before any communication.

    Communicates: the splits of the mesh.
    """
    check_fits(shape, config)
    mesh = Mesh(world, config.parallel.mesh)
    schedule = make_schedule(config)
    stages = build_stages(config, shape, mesh, schedule)
    model = shard_model(config, shape, mesh, stages, drawn=False)
    return StandingModel(
        config=config,
        mesh=mesh,
        model=model,
        executor=build_executor(config, shape, mesh, schedule, model),
        counts_tokens=1.0 if schedule.num_stages - 1 in model.stages else 0.0,
    )


def load_run(parts: StandingModel, folder: RunFolder, step: int | None = None) -> int:
    """Load the weights of a run's checkpoint, whatever layout it was written by.

    Args:
        parts: whose weights.
        folder: of the run, which may be under way.
        step: which checkpoint; None takes the newest that no rollback has taken back.

    Returns:
        The step.

    Raises:
        RunFolderError: the run has no checkpoint yet.
        CheckpointingError: it has none of that step, or it is damaged or of another model.

    Communicates: two broadcasts, and what `StateStore.load_partial` does.
    """
    world = parts.mesh.world
    store = StateStore(
        folder.checkpoints, world, coordinates=parts.mesh.coordinates, run=folder.identity().run
    )
    with store:
        chosen = _newest(store, folder, world) if step is None else step
        pieces = parts.model.pieces
        weights = {
            name: Sharded(each.parameter.detach(), each.spec) for name, each in pieces.items()
        }
        balance = ExpertBalance(parts.mesh, tuple(parts.model.stages.values()), 0.0)
        tree = {"model": weights, "experts": balance.tree()}
        report = store.load_partial(tree, chosen, convert=["model/*"])
        if report.num_missing:
            raise RunFolderError(f"the checkpoint is not one of this model: {report}")
    parts.model.publish()
    return chosen


def _newest(store: StateStore, folder: RunFolder, world: Communicator) -> int:
    """Return the step of the newest checkpoint that is of the run as it went on."""
    entries = shared_journal(folder.path / JOURNAL, world).entries
    # One rank looks: a run that is under way may be saving.
    mine = store.steps() if world.rank == 0 else []
    steps: list[int] = broadcast_object(world, mine, root=0)
    for step in reversed(steps):
        loaded = store.load_partial({"guards": {"state": ""}}, step).tree
        guards = json.loads(loaded["guards"]["state"] or "{}")
        try:
            if guards:
                check_not_abandoned(guards, entries)
        except AbandonedStateError:
            continue
        return step
    raise RunFolderError(
        f"the run in {folder.path} has no checkpoint yet; it saves one at its end, or with "
        "--save-every N every N steps"
    )
