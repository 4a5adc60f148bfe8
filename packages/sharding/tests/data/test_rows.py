"""Ranges become parts along dims as torch.chunk cuts them, on every mesh."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import (
    ColumnParallelLinear,
    Mesh,
    MeshShape,
    RowParallelLinear,
    ShardPolicy,
    by_class,
    data_parallel,
)
from trainwright.sharding.data.held import held_tensors
from trainwright.sharding.data.rows import DATA, RowPlan, gather_specs, move_rows
from trainwright.sharding.testing import load_plain_, mesh_shapes


class Model(nn.Module):
    """Tensor-parallel layers, one without rows for all ranks, a scalar and an empty parameter."""

    def __init__(self, width: int, tp: Communicator | None = None) -> None:
        super().__init__()
        if tp is None:
            self.up: nn.Module = nn.Linear(3, width)
            self.down: nn.Module = nn.Linear(width, 2)
        else:
            self.up = ColumnParallelLinear(3, width, tp, bias=True)
            self.down = RowParallelLinear(width, 2, tp, bias=True)
        self.thin = nn.Linear(4, 1, bias=False)
        self.tall = nn.Linear(2, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.thin.requires_grad_(False)


def chunk(whole: torch.Tensor, dim: int, parts: int, place: int) -> torch.Tensor:
    found = whole.chunk(parts, dim)
    return found[place] if place < len(found) else whole.narrow(dim, 0, 0)


@settings(max_examples=15)
@given(
    shape=mesh_shapes(8, ("dp", "cp", "tp")) | mesh_shapes(8, ("dp", "tp"), hybrid=True),
    policy=st.builds(
        ShardPolicy,
        stage=st.sampled_from([0, 1, 2, 3]),
        alignment=st.integers(1, 3),
        bucket_bytes=st.sampled_from([1, 10**6]),
        units=st.sampled_from([None, by_class(nn.Linear)]),
    ),
    data=st.data(),
)
def test_every_rank_gets_the_rows_that_torch_would_give_it(
    shape: MeshShape, policy: ShardPolicy, data: st.DataObject
) -> None:
    width = math.lcm(shape.tp, 2)
    data_axes = data.draw(st.sampled_from([("dp", "cp"), (DATA,), ("dp_replicate", "dp_shard")]))
    axes = data.draw(st.permutations([*data_axes, "tp"]))
    torch.manual_seed(0)
    state = Model(width).state_dict()

    def run(world: Communicator) -> dict[str, torch.Tensor]:
        mesh = Mesh(world, shape)
        model = Model(width, mesh.communicator("tp"))
        load_plain_(model, state, mesh)
        parallel = data_parallel(model, mesh, policy, hooks=False)
        held = {item.name: item for item in held_tensors(parallel)}
        specs = gather_specs(mesh, held)
        plans = {
            name: RowPlan.of(name, torch.float64, specs[name], axes, mesh)
            for name, _ in model.named_parameters()
        }
        return {name: move_rows(plan, held.get(name)) for name, plan in plans.items()}

    cut = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for rank, found in enumerate(LocalWorld(shape.world_size).run(run)):
        places = shape.places(rank)
        places[DATA] = places["dp"] * shape.cp + places["cp"]
        for name, whole in state.items():
            expected = whole.double()
            for axis in axes:
                dim = {"tp": cut.get(name), "dp_replicate": None}.get(axis, 0)
                size = shape.dp * shape.cp if axis == DATA else shape.size(axis)
                if dim is not None and expected.ndim:
                    expected = chunk(expected, dim, size, places[axis])
            assert torch.equal(found[name], expected), (name, axes)
