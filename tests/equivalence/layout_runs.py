"""Three steps of a row's run on its ranks, and what these hold, joined."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence

import attrs
import torch

from tests.equivalence.communicators import COMMUNICATORS
from tests.equivalence.drawn import BEGUN, load_into_layout
from tests.equivalence.factors import Row, config_of, shape_of
from tests.layouts import Shard, insert, join, observe_gradients
from tests.serial import Outcome, text
from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.integration.optimizers import held
from trainwright.integration.parts import assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.stability_guards import Verdict

STEPS = 3
TIMEOUT_S = 120.0

State = dict[tuple[str, str], tuple[ShardSpec, torch.Tensor]]
"""What one rank's optimizer keeps, by label and key."""


@attrs.frozen(eq=False)
class RankRun:
    """What one rank has after each step, and what its optimizer and its products keep at the end.

    Args:
        steps: record and shards of each.
        states: of the optimizer, after the last.
        scales: of FP8 products, after each step.
    """

    steps: list[tuple[StepRecord, dict[str, Shard]]]
    states: State
    scales: list[dict[str, torch.Tensor]]


@attrs.frozen(eq=False)
class LayoutRun:
    """What all ranks have together."""

    steps: list[Outcome]
    rates: list[float]
    states: dict[tuple[str, str], torch.Tensor]
    scales: list[dict[str, torch.Tensor]]


def run_in_threads(row: Row, weights: Mapping[str, torch.Tensor], steps: int = STEPS) -> LayoutRun:
    """Make the steps on rank threads."""
    size = config_of(row).parallel.mesh.world_size
    work = functools.partial(run_rank, row=row, weights=weights, steps=steps)
    return joined(LocalWorld(size, timeout_s=TIMEOUT_S).run(work))


class _EndError(Exception):
    """The steps are made."""


def run_rank(
    world: Communicator, row: Row, weights: Mapping[str, torch.Tensor], steps: int = STEPS
) -> RankRun:
    """Make the steps on this rank."""
    config = config_of(row)
    comm = COMMUNICATORS[row["communicator"]](world)
    parts = assemble(config, comm, text(), shape_of(row, config))
    gradients = observe_gradients(parts)
    load_into_layout(parts, weights)
    progress = attrs.evolve(parts.start(), step=BEGUN, updates=BEGUN)
    run = RankRun([], {}, [])

    def observe(record: StepRecord) -> None:
        assert record.verdict is Verdict.CONTINUE, record
        shards = {
            name: Shard(piece.spec, gradients[name], piece.parameter.detach().clone())
            for name, piece in parts.model.pieces.items()
        }
        run.steps.append((attrs.evolve(record, pipeline=None), shards))
        scales = [state.scales() for state in parts.scales.states]
        run.scales.append({name: s.clone() for each in scales for name, s in each.items()})
        if len(run.steps) == steps:
            raise _EndError

    with contextlib.suppress(_EndError):
        train(parts, progress, [observe])
    parts.feed.close()
    for label, each in held(parts.optimizer).items():
        for key, value in each.values.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                spec = ShardSpec.full(label, value.shape) if each.is_whole else each.spec
                run.states[label, key] = (spec, value.detach())
    return run


def joined(ranks: Sequence[RankRun]) -> LayoutRun:
    """Join what all ranks have; replicas must agree bit for bit."""
    steps = [join(list(step)) for step in zip(*(rank.steps for rank in ranks), strict=True)]
    states: dict[tuple[str, str], torch.Tensor] = {}
    for rank in ranks:
        for name, (spec, local) in rank.states.items():
            insert(states, name, spec, local)
    scales: list[dict[str, torch.Tensor]] = []
    for held_scales in zip(*(rank.scales for rank in ranks), strict=True):
        whole: dict[str, torch.Tensor] = {}
        for own in held_scales:
            for name, scale in own.items():
                assert torch.equal(whole.setdefault(name, scale), scale), f"ranks scale {name}"
        scales.append(whole)
    return LayoutRun(steps, [record.lr for record, _ in ranks[0].steps], states, scales)
