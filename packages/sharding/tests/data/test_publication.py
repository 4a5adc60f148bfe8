"""Updates that never reach the module are told."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import (
    DataParallel,
    LifecycleError,
    ShardPolicy,
    UnchangedWeightsWarning,
    by_class,
    data_parallel,
)
from trainwright.sharding.mesh import Mesh, MeshShape

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def make(comm: Communicator, stage: int) -> tuple[DataParallel, nn.Module]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    policy = ShardPolicy(stage=stage, units=by_class(nn.Linear), alignment=1)
    return data_parallel(model, Mesh(comm, MeshShape(dp=comm.size)), policy), model


def reduce_gradients(parallel: DataParallel, model: nn.Module) -> None:
    parallel.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    parallel.reduce()
    parallel.wait()


@STAGES
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_was_not_published_is_told_where_the_next_begins(
    stage: int, fused: bool
) -> None:
    def run(comm: Communicator) -> None:
        parallel, model = make(comm, stage)
        pieces = [piece.parameter for piece in parallel.pieces.values()]
        optimizer = torch.optim.AdamW(pieces, lr=0.1, fused=fused)
        reduce_gradients(parallel, model)
        optimizer.step()
        with pytest.raises(LifecycleError, match=r"not published: .* call publish\(\) after"):
            parallel.zero_grad()
        parallel.publish()
        parallel.zero_grad()

    LocalWorld(2).run(run)


@STAGES
def test_an_update_that_is_skipped_need_not_be_published(stage: int) -> None:
    def run(comm: Communicator) -> None:
        parallel, model = make(comm, stage)
        for _ in range(2):
            reduce_gradients(parallel, model)

    LocalWorld(2).run(run)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_of_the_modules_parameters_is_told_after_three_updates(stage: int) -> None:
    def run(comm: Communicator) -> None:
        parallel, model = make(comm, stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(5):
            reduce_gradients(parallel, model)
            optimizer.step()
            parallel.publish()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LocalWorld(2).run(run)

    assert {w.category for w in caught} == {UnchangedWeightsWarning}
    assert "build the optimizer on [p.parameter for p in parallel.pieces.values()]" in str(
        caught[0].message
    )
