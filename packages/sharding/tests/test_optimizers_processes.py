"""Whole matrices over real processes and Gloo."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator
from trainwright.collectives.testing import run_processes
from trainwright.sharding.data import WholeMatrices, by_class, parameter_groups
from trainwright.sharding.data.testing_ways import Way
from trainwright.sharding.mesh import Mesh, MeshShape


def layers() -> nn.Module:
    """Return matrices of different sizes, so that ranks send and receive different parts."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.arange(float(parameter.numel())).view(parameter.shape)
            parameter.copy_((values % 7 - 3) / 4)
    return model


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    rows = torch.arange(6.0).view(2, 3) - rank + step
    outputs: torch.Tensor = model(rows)
    return outputs.square().sum() / 64


def train(comm: Communicator) -> list[dict[str, torch.Tensor]]:
    found: list[dict[str, torch.Tensor]] = []
    for stage in (1, 3):
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        driven = Way(stage).drive(layers(), mesh, units=by_class(nn.Linear))
        parallel = driven.parallel
        muon = functools.partial(torch.optim.Muon, lr=0.1)
        names = ["0.weight", "1.weight", "2.weight"]
        matrices = WholeMatrices(parallel, names, muon, round_bytes=64)
        rest = torch.optim.SGD(parameter_groups(parallel, ["0.bias", "1.bias"]), lr=0.01)
        for step in range(2):
            driven.reduce([functools.partial(loss, parallel.module, comm.rank, step)])
            matrices.step()
            rest.step()
            parallel.publish()
        found.append(driven.weights())
    return found


@pytest.mark.long  # starting processes takes longer than the rest of these files
@pytest.mark.processes
def test_muon_over_processes_is_muon_in_one() -> None:
    plain = layers()
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(matrices, lr=0.1)
    rest = torch.optim.SGD([p for p in plain.parameters() if p.ndim == 1], lr=0.01)
    for step in range(2):
        plain.zero_grad()
        for rank in range(2):
            loss(plain, rank, step).backward()
        muon.step()
        rest.step()

    for stages in run_processes(train, 2, timeout_s=200.0):
        for weights in stages:
            for name, parameter in plain.named_parameters():
                # A sum in another order may round inside Muon to a neighbouring bfloat16.
                torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=2e-3)
