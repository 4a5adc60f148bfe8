"""Running a step, or a whole trajectory, in a layout and joining what its ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from tests.serial import Outcome, Snapshot, text
from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.collectives.shm import SharedMemoryCommunicator
from trainwright.collectives.testing import run_processes
from trainwright.integration.config import RunConfig
from trainwright.integration.model import ModelShape
from trainwright.integration.parts import Parts, Progress, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.training_state import materialise_states

MOMENTS = ("exp_avg", "exp_avg_sq")


@attrs.frozen(eq=False)
class Shard:
    """What one rank holds of one parameter."""

    spec: ShardSpec
    gradient: torch.Tensor
    weight: torch.Tensor


RankSteps = list[tuple[StepRecord, dict[str, Shard]]]
"""What one rank has after each of some steps."""


def steps_in_layout(
    config: RunConfig, shape: ModelShape, states: Sequence[Snapshot]
) -> list[Outcome]:
    """Load serial states into a layout of rank threads, make a step after each, join the ranks."""

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(
        steps_of_rank, config, shape, states
    )
    return join_steps(ranks)


def steps_in_processes(
    config: RunConfig, shape: ModelShape, states: Sequence[Snapshot]
) -> Mapping[str, list[Outcome]]:
    """Do what `steps_in_layout` does in processes, over Gloo and then over shared memory."""
    world_size = config.parallel.mesh.world_size
    ranks = run_processes(_over_each, world_size, config, shape, states, timeout_s=150.0)
    return {name: join_steps([rank[name] for rank in ranks]) for name in ranks[0]}


def steps_of_rank(
    comm: Communicator, config: RunConfig, shape: ModelShape, states: Sequence[Snapshot]
) -> RankSteps:
    """Make the steps on this rank."""
    parts = assemble(config, comm, text(), shape)
    gradients = observe_gradients(parts)
    return [one_step(parts, gradients, before) for before in states]


def join_steps(ranks: Sequence[RankSteps]) -> list[Outcome]:
    """Join what all ranks hold after each step."""
    return [join(list(step)) for step in zip(*ranks, strict=True)]


def _over_each(
    gloo: Communicator, config: RunConfig, shape: ModelShape, states: Sequence[Snapshot]
) -> dict[str, RankSteps]:
    worlds = {"gloo": gloo, "shm": SharedMemoryCommunicator()}
    return {n: steps_of_rank(world, config, shape, states) for n, world in worlds.items()}


def trajectory(config: RunConfig, shape: ModelShape) -> list[StepRecord]:
    """Train from the start in a layout of rank threads; return the first rank's records."""

    def work(comm: Communicator) -> list[StepRecord]:
        parts = assemble(config, comm, text(), shape)
        records: list[StepRecord] = []
        train(parts, parts.start(), [records.append])
        return records

    return LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)[0]


def observe_gradients(parts: Parts) -> dict[str, torch.Tensor]:
    """Return a dict that holds the clipped gradients of the last update, by name."""
    gradients: dict[str, torch.Tensor] = {}
    update = parts.optimizer.step

    def observed_update(*arguments: Any) -> Any:
        for name, piece in parts.model.pieces.items():
            gradients[name] = piece.parameter.grad.clone()
        return update(*arguments)

    parts.optimizer.step = observed_update
    return gradients


def one_step(
    parts: Parts, gradients: dict[str, torch.Tensor], before: Snapshot
) -> tuple[StepRecord, dict[str, Shard]]:
    """Make the step after ``before`` on this rank."""
    return step_from(parts, gradients, load_snapshot(parts, before))


def step_from(
    parts: Parts, gradients: dict[str, torch.Tensor], progress: Progress
) -> tuple[StepRecord, dict[str, Shard]]:
    """Make one step on this rank from where it is."""
    records: list[StepRecord] = []
    _train_one(parts, progress, records)
    shards = {
        name: Shard(piece.spec, gradients[name], piece.parameter.detach().clone())
        for name, piece in parts.model.pieces.items()
    }
    return records[0], shards


def load_snapshot(parts: Parts, before: Snapshot) -> Progress:
    """Put a serial state into this rank's pieces."""
    materialise_states(parts, before.step)
    for name, piece in parts.model.pieces.items():
        state = parts.optimizer.state[piece.parameter]
        _fill(piece.parameter, piece.spec, before.weights[name])
        for moment, values in zip(
            MOMENTS, (before.first_moments, before.second_moments), strict=True
        ):
            _fill(state[moment], piece.spec, values[name])
        state["step"].fill_(float(before.step))
    parts.model.publish()
    parts.feed.load_state_dict({"consumed": before.step * parts.config.sizes.global_batch})
    return attrs.evolve(parts.start(), step=before.step, updates=before.step)


def join(ranks: list[tuple[StepRecord, dict[str, Shard]]]) -> Outcome:
    """Put the shards of all ranks into whole tensors; every element must be held by some rank.

    Replicas must agree bit for bit, and every rank must have seen the same loss and norm.
    """
    records = {(record.loss, record.grad_norm) for record, _ in ranks}
    assert len(records) == 1, f"ranks report different losses or norms: {records}"
    gradients: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = {}
    for _, shards in ranks:
        for name, shard in shards.items():
            insert(gradients, name, shard.spec, shard.gradient)
            insert(weights, name, shard.spec, shard.weight)
    for name, tensor in [*gradients.items(), *weights.items()]:
        assert not tensor.isnan().any(), f"no rank holds a part of {name}"
    loss, norm = records.pop()
    return Outcome(loss=loss, norm=norm, gradients=gradients, weights=weights)


def insert(
    wholes: dict[Any, torch.Tensor], name: Any, spec: ShardSpec, local: torch.Tensor
) -> None:
    """Put a shard into the whole tensor of its name; what another rank has put there is equal."""
    whole = wholes.setdefault(name, local.new_full(spec.global_shape, float("nan")))
    local = local.view(spec.local_shape)
    held = spec.extract(whole)
    known = ~held.isnan()
    assert torch.equal(held[known], local[known]), f"replicas of {name} differ"
    spec.insert(local, whole)


@torch.no_grad()
def _fill(local: torch.Tensor, spec: ShardSpec, whole: torch.Tensor) -> None:
    local.copy_(spec.extract(whole).view_as(local))


def _train_one(parts: Parts, progress: Progress, records: list[StepRecord]) -> None:
    class OneStepError(Exception):
        pass

    def stop(record: StepRecord) -> None:
        records.append(record)
        raise OneStepError

    try:
        train(parts, progress, [stop])
    except OneStepError:
        return
