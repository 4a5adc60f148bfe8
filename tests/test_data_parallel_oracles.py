"""Over real processes and Gloo, with PyTorch's own data parallelism as the oracle."""

from __future__ import annotations

from contextlib import nullcontext

import attrs
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainwright.collectives import Communicator
from trainwright.collectives.testing import run_processes
from trainwright.sharding.data import ShardPolicy, by_class, data_parallel, full_state_dict
from trainwright.sharding.data.testing import Network, NetworkPlan
from trainwright.sharding.mesh import Mesh, MeshShape

PLAN = NetworkPlan(hidden=7, depth=2, tied=False, frozen=True, scalar=True)
PLAIN = attrs.evolve(PLAN, frozen=False, scalar=False)
"""FSDP2 takes no 0-d parameters."""
NUM_STEPS = 10
NUM_MICROBATCHES = 2


def rows_of(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((step * 10 + rank) * 10 + microbatch)
    return torch.randn(4, PLAN.inputs, generator=generator, dtype=PLAN.dtype)


def train_ours(
    comm: Communicator, plan: NetworkPlan, stage: int, *, skips: bool
) -> dict[str, torch.Tensor]:
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    policy = ShardPolicy(stage=stage, units=by_class(nn.Linear), bucket_bytes=200, alignment=4)
    parallel = data_parallel(Network(plan, seed=comm.rank), mesh, policy)
    optimizer = torch.optim.AdamW(
        [piece.parameter for piece in parallel.pieces.values()], lr=0.05, eps=1e-2
    )
    for step in range(NUM_STEPS):
        parallel.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            if microbatch == NUM_MICROBATCHES - 1:
                parallel.last_backward()
            skipped = frozenset({comm.rank % 2} if skips else ())
            loss = parallel.module(rows_of(step, comm.rank, microbatch), skipped).square().sum()
            loss.backward()
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
    return full_state_dict(parallel)


def train_ddp(comm: Communicator) -> dict[str, torch.Tensor]:
    model = DistributedDataParallel(
        Network(PLAN, seed=comm.rank), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            with model.no_sync() if microbatch == 0 else nullcontext():
                skipped = frozenset({comm.rank % 2})
                rows = rows_of(step, comm.rank, microbatch)
                # DDP divides by the number of ranks; ours leaves sums as they are.
                (model(rows, skipped).square().sum() * comm.size).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.module.named_parameters()}


def train_fsdp(comm: Communicator) -> dict[str, torch.Tensor]:
    model = Network(PLAIN)
    for layer in [model.first, *model.layers, model.last]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-2)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            # FSDP divides by the number of ranks as well.
            (model(rows_of(step, comm.rank, microbatch)).square().sum() * comm.size).backward()
        optimizer.step()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.detach().full_tensor()
    return found


def train_all(comm: Communicator) -> dict[str, list[dict[str, torch.Tensor]]]:
    stages = range(4)
    return {
        "DDP": [train_ddp(comm), *(train_ours(comm, PLAN, s, skips=True) for s in stages)],
        "FSDP2": [train_fsdp(comm), *(train_ours(comm, PLAIN, s, skips=False) for s in stages)],
    }


@pytest.mark.processes
def test_weights_at_every_stage_are_those_of_ddp_with_skipped_layers_and_of_fsdp2() -> None:
    results = run_processes(train_all, 2, timeout_s=200.0)[0]

    for name_of_oracle, (oracle, *stages) in results.items():
        assert len(stages) == 4
        for stage, ours in enumerate(stages):
            assert ours.keys() == oracle.keys()
            for name, weight in oracle.items():
                torch.testing.assert_close(
                    ours[name],
                    weight,
                    rtol=1e-11,
                    atol=1e-13,
                    msg=lambda text, at=(name_of_oracle, stage, name): f"{at}: {text}",
                )
