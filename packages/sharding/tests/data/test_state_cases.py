"""Cases in which peers lost, padded or untied something on the way out or in."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import (
    Mesh,
    MeshShape,
    ParameterPlacement,
    Partial,
    ShardPolicy,
    data_parallel,
)
from trainwright.sharding.data.loading import load_full
from trainwright.sharding.data.state_dict import full_state_dict
from trainwright.sharding.data.testing import wrap


def test_an_export_has_no_padding_whatever_the_groups() -> None:
    # SHD-17: two groups of five and three elements over two ranks, each padded by one.
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(5.0))
            self.b = nn.Parameter(torch.arange(10.0, 13.0))

    def run(world: Communicator) -> tuple[list[int], dict[str, torch.Tensor]]:
        mesh = Mesh(world, MeshShape(dp=2))
        apart = {"b": ParameterPlacement.replicated((3,), {"dp": Partial(), "tp": Partial()})}
        parallel = data_parallel(Two(), mesh, ShardPolicy(stage=1, alignment=1), apart)
        return [group.numel for group in parallel.layout], full_state_dict(parallel)

    numels, state = LocalWorld(2).run(run)[0]

    assert sorted(numels) == [4, 6]
    assert {name: tensor.tolist() for name, tensor in state.items()} == {
        "w": [0, 1, 2, 3, 4],
        "b": [10, 11, 12],
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(5, 4), (1, 4), ()])
def test_a_full_tensor_is_loaded_and_collected_where_sizes_do_not_divide(
    shape: tuple[int, ...], stage: int
) -> None:
    # SHD-20: dim 0 over dp=2 is 3 + 2 rows (or 1 + 0, or no dim at all), dim 1 over tp=2.
    whole = torch.arange(20.0)[: torch.Size(shape).numel()].view(shape)

    class One(nn.Module):
        def __init__(self, tp: Communicator) -> None:
            super().__init__()
            self.placement = (
                ParameterPlacement.sharded(shape, 1, rank=tp.rank, size=tp.size)
                if shape
                else ParameterPlacement.replicated(shape)
            )
            box = self.placement.boxes[0]
            self.weight = nn.Parameter(torch.zeros(box.shape))

        def parameter_placements(self) -> Mapping[str, ParameterPlacement]:
            return {"weight": self.placement}

    def run(world: Communicator) -> dict[str, torch.Tensor]:
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        policy = ShardPolicy(stage=stage, alignment=1)
        parallel = data_parallel(One(mesh.communicator("tp")), mesh, policy, hooks=False)
        load_full(parallel, {"weight": whole} if world.rank == 0 else None)
        return full_state_dict(parallel)

    assert torch.equal(LocalWorld(4).run(run)[0]["weight"], whole)


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 2, dtype=torch.float64)
        self.head = nn.Linear(2, 4, bias=False, dtype=torch.float64)
        self.head.weight = self.emb.weight
        with torch.no_grad():
            self.emb.weight.copy_(torch.arange(8.0).view(4, 2).sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(tokens)).logsumexp(-1).sum()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_weights_train_as_one_and_are_exported_under_both_names(stage: int) -> None:
    # SHD-22
    plain = Tied()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (plain(torch.tensor([0, 2])) + plain(torch.tensor([1, 2]))).backward()
        optimizer.step()

    def run(world: Communicator) -> tuple[dict[str, torch.Tensor], int]:
        parallel = wrap(Tied(), world, stage=stage)
        optimizer = torch.optim.Adam((p.parameter for p in parallel.pieces.values()), lr=0.1)
        for _ in range(2):
            parallel.zero_grad()
            parallel.await_weights()
            parallel.module(torch.tensor([world.rank, 2])).backward()
            parallel.reduce()
            parallel.wait()
            optimizer.step()
            parallel.publish()
        assert parallel.module.head.weight is parallel.module.emb.weight
        return full_state_dict(parallel), len(optimizer.state)

    (state, num_states), (_, num_others) = LocalWorld(2).run(run)

    assert list(state) == ["emb.weight", "head.weight"]
    assert state["emb.weight"] is state["head.weight"]
    torch.testing.assert_close(state["emb.weight"], plain.emb.weight.detach())
    assert num_states == num_others == 1


class Stage(nn.Module):
    """One of three pipeline stages; the first and the last share a weight."""

    def __init__(self, stage: int, *, same_name: bool) -> None:
        super().__init__()
        self.stage = stage
        self.layer = nn.ModuleDict({str(stage): nn.Linear(2, 3)})
        nn.init.constant_(self.layer[str(stage)].weight, stage)
        nn.init.constant_(self.layer[str(stage)].bias, -stage)
        self.register_buffer("positions", torch.arange(3))
        if stage in (0, 2):
            name = "embedding" if same_name or stage == 0 else "head"
            self.register_module(name, nn.Embedding(5, 2))
            nn.init.constant_(self.get_submodule(name).weight, 7.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_full_state_joins_the_stages_of_a_pipeline(stage: int) -> None:
    def run(world: Communicator) -> dict[str, torch.Tensor]:
        mesh = Mesh(world, MeshShape(pp=3, dp=2))
        module = Stage(mesh.coordinate("pp"), same_name=True)
        parallel = data_parallel(module, mesh, ShardPolicy(stage=stage, alignment=1), hooks=False)
        state = full_state_dict(parallel)
        changed = {name: tensor + 1 for name, tensor in state.items()}
        load_full(parallel, changed or None)
        assert int(module.positions[0]) == 1
        return full_state_dict(parallel)

    state = LocalWorld(6).run(run)[0]

    assert list(state) == [
        "positions",
        "layer.0.weight",
        "layer.0.bias",
        "embedding.weight",
        *(f"layer.{stage}.{kind}" for stage in (1, 2) for kind in ("weight", "bias")),
    ]
    assert torch.equal(state["layer.2.bias"], torch.full((3,), -1.0))
    assert torch.equal(state["embedding.weight"], torch.full((5, 2), 8.0))
