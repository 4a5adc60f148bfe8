"""Last backwards that are not alike on all ranks, or not the only ones of their step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import DataParallel, ShardPolicy, by_class, data_parallel
from trainwright.sharding.mesh import Mesh, MeshShape

STEPS = 3
Step = Callable[[DataParallel | None, nn.Module, int, int], None]


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 4, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(4, 4, dtype=dtype))


def inputs_of(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=dtype)


def arm(parallel: DataParallel | None) -> None:
    if parallel is not None:
        parallel.last_backward()


def check_equals_serial(step_of: Step, stage: int, dtype: torch.dtype = torch.float64) -> None:
    with torch.random.fork_rng():
        plain = make_model(dtype)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            step_of(None, plain, step, rank)
        optimizer.step()

    def run(comm: Communicator) -> dict[str, torch.Tensor]:
        model = make_model(dtype)
        model.load_state_dict(initial)
        policy = ShardPolicy(stage=stage, units=by_class(nn.Linear), alignment=1)
        parallel = data_parallel(model, Mesh(comm, MeshShape(dp=2)), policy)
        optimizer = torch.optim.SGD([p.parameter for p in parallel.pieces.values()], lr=0.1)
        for step in range(STEPS):
            parallel.zero_grad()
            step_of(parallel, model, step, comm.rank)
            parallel.reduce()
            parallel.wait()
            optimizer.step()
            parallel.publish()
        parallel.await_weights()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    with torch.random.fork_rng():
        initial = make_model(dtype).state_dict()
    found = LocalWorld(2).run(run)

    eps = torch.finfo(dtype).eps
    for weights in found:
        for name, parameter in plain.named_parameters():
            # Sums of a few terms in another order, over three steps.
            torch.testing.assert_close(
                weights[name], parameter.detach(), rtol=100 * eps, atol=100 * eps
            )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_some_ranks_may_say_which_backward_is_the_last(stage: int) -> None:
    def step(parallel: DataParallel | None, model: nn.Module, step: int, rank: int) -> None:
        if (rank + step) % 2:
            arm(parallel)
        model(inputs_of(step, rank, torch.float64)).square().sum().backward()

    check_equals_serial(step, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_may_have_nothing_to_compute(stage: int) -> None:
    def step(parallel: DataParallel | None, model: nn.Module, step: int, rank: int) -> None:
        arm(parallel)
        loss = model(inputs_of(step, rank, torch.float64)).square().sum()
        if rank or step == 0:
            loss.backward()

    check_equals_serial(step, stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_may_contain_gradients(stage: int) -> None:
    def step(parallel: DataParallel | None, model: nn.Module, step: int, rank: int) -> None:
        arm(parallel)
        inputs = inputs_of(step, rank, torch.float64).requires_grad_()
        loss = model(inputs).square().sum()
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward()

    check_equals_serial(step, stage)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_casts_of_weights_may_be_shared_by_forwards_under_autocast(stage: int) -> None:
    def step(parallel: DataParallel | None, model: nn.Module, step: int, rank: int) -> None:
        arm(parallel)
        inputs = inputs_of(step, rank, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            target = model(2 * inputs).detach()
            loss = (model(inputs) - target).float().square().sum()
        loss.backward()

    check_equals_serial(step, stage, torch.float32)
