"""Models that are initialised while they are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.sharding.data import ShardPolicy, by_class, data_parallel
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh, MeshShape

WIDTH = 16


class Scaled(nn.Module):
    """A linear layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(rows) * self.scale
        return result


class Model(nn.Module):
    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.layers = nn.Sequential(*(Scaled() for _ in range(num_layers)))
        self.head = nn.Linear(WIDTH, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("position", torch.zeros(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def initialize(name: str, module: nn.Module) -> None:
    for number, tensor in enumerate(
        (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ):
        values = torch.arange(tensor.numel(), dtype=torch.float32) + len(name) + number
        tensor.copy_(values.sin().view(tensor.shape) / 4)


def make_plain() -> Model:
    model = Model()
    with torch.no_grad():
        for name, module in reversed(list(model.named_modules())):
            initialize(name, module)
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_meta_model_trains_as_the_plain_one(stage: int) -> None:
    def run(comm: Communicator) -> list[torch.Tensor]:
        with torch.device("meta"):
            model = Model()
        model.layers[0].requires_grad_(False)
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=stage, units=by_class(Scaled), alignment=1)
        parallel = data_parallel(model, mesh, policy, initialize=initialize)
        assert model.head.weight is model.embedding.weight
        optimizer = torch.optim.SGD([p.parameter for p in parallel.pieces.values()], lr=0.1)
        model(torch.tensor([comm.rank, 2])).square().sum().backward()
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
        parallel.await_weights()
        return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]

    plain = make_plain()
    plain.layers[0].requires_grad_(False)
    for rank in range(2):
        plain(torch.tensor([rank, 2])).square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    for found in LocalWorld(2).run(run):
        for mine, whole in zip(found, (*plain.parameters(), *plain.buffers()), strict=True):
            torch.testing.assert_close(mine, whole.detach(), rtol=1e-5, atol=1e-5)


def test_at_stage_three_no_more_than_one_unit_is_ever_whole() -> None:
    def run(comm: Communicator) -> int:
        with torch.device("meta"):
            model = Model()
        most = 0

        def count(name: str, module: nn.Module) -> None:
            nonlocal most
            initialize(name, module)
            live = {
                p.untyped_storage()._cdata: p.untyped_storage().nbytes()
                for p in model.parameters()
                if not p.is_meta
            }
            most = max(most, sum(size for size in live.values() if size > p_placeholder))

        mesh = Mesh(comm, MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=3, units=by_class(Scaled), alignment=1)
        data_parallel(model, mesh, policy, initialize=count)
        return most

    p_placeholder = 4
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    for most in LocalWorld(2).run(run):
        assert 0 < most <= unit


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_meta_model_without_an_initializer_is_refused_by_name(kind: str) -> None:
    model = nn.Linear(1, 1, device="meta" if kind == "parameter" else None)
    if kind == "buffer":
        model.register_buffer("cache", torch.zeros(1, device="meta"))

    with pytest.raises(ShardingError, match=r"(weight|cache) is on the meta device; pass init"):
        data_parallel(model, Mesh(SingleCommunicator(), MeshShape()))
