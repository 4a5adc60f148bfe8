"""A step that an exception broke off is dropped whole, on whatever ranks it came."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import LifecycleError, ShardPolicy, by_class, data_parallel
from trainwright.sharding.mesh import Mesh, MeshShape

F64 = torch.float64
BROKEN = 2


class Chain(nn.Module):
    """Layers, the second of which raises on request."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=F64) for _ in range(5))
        self.fails: str | None = None
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64) / 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            hidden = hidden + torch.tanh(layer(hidden))
            if index == 1 and self.fails == "forward":
                raise MemoryError("in a forward")
            if index == 1 and self.fails == "backward":
                hidden.register_hook(self.fail)
        return hidden

    def fail(self, gradient: torch.Tensor) -> None:
        raise MemoryError("in a backward")


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, 6, dtype=F64).view(2, 3) * (step + 1) / (rank + 2)
    loss: torch.Tensor = model(inputs).square().sum()
    return loss


def train(
    comm: Communicator, where: str, one_rank: bool, armed: bool, until: str, **policy: Any
) -> dict[str, torch.Tensor]:
    model = Chain()
    chosen = ShardPolicy(units=by_class(nn.Linear), alignment=1, **policy)
    parallel = data_parallel(model, Mesh(comm, MeshShape(dp=comm.size)), chosen)
    optimizer = torch.optim.SGD([piece.parameter for piece in parallel.pieces.values()], lr=0.01)
    for step in range(5):
        parallel.zero_grad()
        if armed:
            parallel.last_backward()
        fails = step == BROKEN and (comm.rank == 0 or not one_rank)
        model.fails = where if fails else None
        if fails:
            with pytest.raises(MemoryError):
                loss_of(model, step, comm.rank).backward()
        else:
            loss_of(model, step, comm.rank).backward()
        if step == BROKEN:
            if not fails and until != "backward":
                with suppress(LifecycleError):  # ranks have run different passes
                    parallel.reduce()
                    if until == "wait":
                        parallel.wait()
            parallel.zero_grad(discard=True)
            continue
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
    parallel.await_weights()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("where", "one_rank", "armed", "stage", "each"),
    [
        ("forward", False, True, 3, False),
        *(("forward", True, True, stage, False) for stage in range(4)),
        *(("backward", True, True, stage, False) for stage in range(4)),
        ("forward", True, False, 3, False),
        ("backward", True, False, 1, False),
        ("forward", True, False, 2, True),
        ("forward", True, False, 3, True),
        ("backward", False, False, 3, True),
        ("backward", True, False, 2, True),
    ],
)
def test_a_dropped_step_is_in_no_later_one(
    where: str, one_rank: bool, armed: bool, stage: int, each: bool
) -> None:
    check_is_dropped(where, one_rank, armed, stage=stage, reduce_each_backward=each)


@pytest.mark.parametrize("until", ["reduce", "wait"])
@pytest.mark.parametrize(
    ("stage", "each", "missing"),
    [
        (0, False, "error"),
        (1, False, "zero"),
        (2, False, "error"),
        (2, True, "zero"),
        (3, False, "zero"),
        (3, False, "error"),
        (3, True, "zero"),
    ],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_other_ranks_may_have_come_further_when_a_step_is_dropped(
    where: str, stage: int, each: bool, until: str, missing: str
) -> None:
    options = {"stage": stage, "reduce_each_backward": each, "missing_gradients": missing}
    check_is_dropped(where, True, True, until, **options)


def test_a_step_with_a_gradient_that_no_buffer_holds_can_be_dropped() -> None:
    def run(comm: Communicator) -> float:
        model = nn.Embedding(5, 2, sparse=comm.rank == 0)
        mesh = Mesh(comm, MeshShape(dp=2))
        parallel = data_parallel(model, mesh, ShardPolicy(stage=2, alignment=1))
        if comm.rank == 0:
            with pytest.raises(LifecycleError, match="sparse"):
                model(torch.tensor([1])).sum().backward()
        parallel.zero_grad(discard=True)
        model.sparse = False
        model(torch.tensor([1])).sum().backward()
        parallel.reduce()
        parallel.wait()
        return float(parallel.pieces["weight"].parameter.grad.sum())

    assert sum(LocalWorld(2).run(run)) == 4.0


def check_is_dropped(
    where: str, one_rank: bool, armed: bool, until: str = "backward", **policy: Any
) -> None:
    plain = Chain()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    for step in (step for step in range(5) if step != BROKEN):
        optimizer.zero_grad()
        for rank in range(2):
            loss_of(plain, step, rank).backward()
        optimizer.step()

    ranks = LocalWorld(2).run(lambda comm: train(comm, where, one_rank, armed, until, **policy))

    for weights in ranks:
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)
