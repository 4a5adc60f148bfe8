"""Over real processes and Gloo, with PyTorch's DistributedDataParallel as the oracle."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from trainwright.collectives import Communicator
from trainwright.collectives.testing import run_processes
from trainwright.sharding.data import ShardPolicy, data_parallel
from trainwright.sharding.data.testing import Network, NetworkPlan
from trainwright.sharding.mesh import Mesh, MeshShape

PLAN = NetworkPlan(hidden=7, depth=2, tied=False, frozen=True, scalar=True)
NUM_STEPS = 3
NUM_MICROBATCHES = 2


def rows_of(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((step * 10 + rank) * 10 + microbatch)
    return torch.randn(4, PLAN.inputs, generator=generator, dtype=PLAN.dtype)


def train_ours(comm: Communicator, stage: int) -> dict[str, torch.Tensor]:
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    policy = ShardPolicy(stage=stage, bucket_bytes=200, alignment=4)
    parallel = data_parallel(Network(PLAN, seed=comm.rank), mesh, policy)
    optimizer = torch.optim.AdamW(
        [piece.parameter for piece in parallel.pieces.values()], lr=0.05, eps=1e-2
    )
    for step in range(NUM_STEPS):
        parallel.zero_grad()
        for microbatch in range(NUM_MICROBATCHES):
            if microbatch == NUM_MICROBATCHES - 1:
                parallel.last_backward()
            skipped = frozenset({comm.rank % 2})
            loss = parallel.module(rows_of(step, comm.rank, microbatch), skipped).square().sum()
            loss.backward()
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
    return {name: p.detach().clone() for name, p in parallel.module.named_parameters()}


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


def train_all(comm: Communicator) -> list[dict[str, torch.Tensor]]:
    return [train_ddp(comm), train_ours(comm, 0), train_ours(comm, 1)]


@pytest.mark.processes
def test_weights_are_those_of_torchs_ddp() -> None:
    results = run_processes(train_all, 2, timeout_s=200.0)

    oracle = results[0][0]
    for trained in results:
        for ours in trained[1:]:
            for name, weight in oracle.items():
                torch.testing.assert_close(ours[name], weight, rtol=1e-11, atol=1e-13)
