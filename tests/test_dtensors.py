"""States as DTensors, over real processes, with PyTorch's own distribution as the oracle."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.collectives import Communicator, LocalWorld
from trainwright.collectives.testing import run_processes
from trainwright.sharding import (
    ColumnParallelLinear,
    Mesh,
    MeshShape,
    RowParallelLinear,
    ShardingError,
    ShardPolicy,
    data_parallel,
)
from trainwright.sharding.data.dtensor import dtensor_state_dict
from trainwright.sharding.data.loading import load_full
from trainwright.sharding.data.replicas import check_replicas
from trainwright.sharding.data.state_dict import full_state_dict
from trainwright.sharding.data.testing import Network, NetworkPlan, wrap
from trainwright.sharding.testing import load_plain_

PLAN = NetworkPlan(
    inputs=3, hidden=5, depth=2, outputs=1, tied=True, frozen=True, scalar=True, empty=True
)


class Layers(nn.Module):
    """Tensor-parallel layers between replicated ones, with the plain model's names."""

    def __init__(self, tp: Communicator | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("steps", torch.tensor(3))
        if tp is None:
            self.up = nn.Linear(4, 6)
            self.down = nn.Linear(6, 5)
        else:
            self.up = ColumnParallelLinear(4, 6, tp, bias=True)
            self.down = RowParallelLinear(6, 5, tp, bias=True)


def check_against_torch(
    state: dict[str, torch.Tensor], plain: nn.Module, device_mesh: DeviceMesh
) -> None:
    expected = plain.state_dict()
    assert list(state) == list(expected)
    buffers = dict(plain.named_buffers())
    for name, whole in expected.items():
        found = state[name]
        if name in buffers:
            assert torch.equal(found, whole)
            continue
        assert isinstance(found, dist.tensor.DTensor)
        assert found.device_mesh == device_mesh
        oracle = dist.tensor.distribute_tensor(whole, device_mesh, found.placements)
        assert found.shape == oracle.shape
        assert found.stride() == oracle.stride()
        assert torch.equal(found.to_local(), oracle.to_local()), name
        assert torch.equal(found.full_tensor(), whole), name


def compare_data_ranks(comm: Communicator) -> None:
    device_mesh = init_device_mesh("cpu", (comm.size,))
    for stage in range(4):
        policy = ShardPolicy(stage=stage, bucket_bytes=100, alignment=1)
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        parallel = data_parallel(Network(PLAN), mesh, policy, hooks=False)
        state = dtensor_state_dict(parallel, device_mesh)
        check_against_torch(state, Network(PLAN), device_mesh)
        assert state["scale"].placements == (dist.tensor.Replicate(),)
        assert state["layers.0.weight"] is state["layers.1.weight"]
    sharded = dist.fsdp.fully_shard(nn.Linear(5, 7), mesh=device_mesh)
    theirs = sharded.state_dict()
    ours = wrap(nn.Linear(5, 7), comm, stage=3)
    sharded.load_state_dict(dtensor_state_dict(ours, device_mesh))
    for name, tensor in dtensor_state_dict(ours, device_mesh).items():
        assert theirs[name].placements == tensor.placements
        assert torch.equal(theirs[name].to_local(), tensor.to_local())


def compare_products(comm: Communicator) -> None:
    torch.manual_seed(0)
    plain = Layers()
    for text in ("dp=2,dp_shard=1", "tp=2"):
        mesh = Mesh(comm, MeshShape.parse(text))
        tp = mesh.communicator("tp") if mesh.size("tp") > 1 else None
        model = Layers(tp)
        load_plain_(model, plain.state_dict(), mesh)
        parallel = data_parallel(model, mesh, ShardPolicy(stage=1))
        state = dtensor_state_dict(parallel)
        weight = state["up.weight"]
        assert isinstance(weight, dist.tensor.DTensor)
        check_against_torch(state, plain, weight.device_mesh)
        if mesh.size("tp") > 1:
            assert weight.placements == (dist.tensor.Shard(0), dist.tensor.Shard(0))
            assert state["down.weight"].placements == (dist.tensor.Shard(0), dist.tensor.Shard(1))
            assert state["down.bias"].placements == (dist.tensor.Shard(0), dist.tensor.Replicate())
        else:
            assert weight.placements == (dist.tensor.Replicate(), dist.tensor.Shard(0))


def refuse_what_does_not_fit(comm: Communicator) -> None:
    mesh = Mesh(comm, MeshShape(tp=2))
    parallel = data_parallel(nn.Linear(4, 4), mesh)
    cases = [
        (init_device_mesh("cpu", (2,)), "needs a dim named 'tp', as the mesh has tp=2"),
        (init_device_mesh("cpu", (1, 2), mesh_dim_names=("dq", "tp")), "dim named 'dq'"),
        (init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp")), "on dp rank . is 0 of 1"),
        (
            init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp", "dp_shard", "tp")),
            "dp is dp_replicate and dp_shard",
        ),
    ]
    for device_mesh, message in cases:
        with pytest.raises(ShardingError, match=message):
            dtensor_state_dict(parallel, device_mesh)
    alone = comm.split(comm.rank)
    assert alone is not None
    with pytest.raises(ShardingError, match="pass a device_mesh of the mesh's ranks"):
        dtensor_state_dict(wrap(nn.Linear(2, 2), alone))


def move_whole_states(comm: Communicator) -> None:
    plain, other = Network(PLAN), Network(PLAN, seed=1)
    for stage in (0, 3):
        parallel = wrap(Network(PLAN), comm, stage=stage)
        found = full_state_dict(parallel, root=1, block_bytes=16)
        assert list(found) == (list(plain.state_dict()) if comm.rank == 1 else [])
        assert all(torch.equal(found[name], plain.state_dict()[name]) for name in found)
        state = other.state_dict() if comm.rank == 1 else None
        load_full(parallel, state, root=1, block_bytes=16)
        parallel.await_weights()
        for name, tensor in parallel.module.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name])
        check_replicas(parallel)


def run_all(comm: Communicator) -> int:
    # Not above: this process needs neither, and importing them takes seconds.
    for name in ("fsdp", "tensor"):
        importlib.import_module(f"torch.distributed.{name}")
    move_whole_states(comm)
    compare_data_ranks(comm)
    compare_products(comm)
    refuse_what_does_not_fit(comm)
    return dist.get_rank()


def test_dtensors_are_those_that_torch_cuts_and_collects() -> None:
    assert run_processes(run_all, 2, timeout_s=120.0) == [0, 1]


def test_without_a_process_group_dtensors_are_refused() -> None:
    def run(world: Communicator) -> None:
        parallel = wrap(nn.Linear(2, 2), world)
        with pytest.raises(ShardingError, match=r"call torch\.distributed\.init_process_group"):
            dtensor_state_dict(parallel)

    LocalWorld(2).run(run)
