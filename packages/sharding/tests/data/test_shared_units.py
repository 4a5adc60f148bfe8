"""A unit that runs in several places of a model, of which ranks skip different ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.sharding.data import GatherOrderWarning, ShardPolicy, by_class, data_parallel
from trainwright.sharding.data.testing_ways import assemble
from trainwright.sharding.mesh import Mesh, MeshShape

F64 = torch.float64
Parts = list[tuple[ShardSpec, torch.Tensor]]
ORDER = (0, 1, 2, 3, 4, 5, 6, 1)
"""The unit that runs at each place; unit 1 at two."""

PLACES = (
    ([1, 3, 4], [0, 2, 3, 5, 6, 7], [1, 4, 5, 6, 7]),
    ([0, 2, 4, 5, 6], [0, 3, 4, 6], [0, 1, 2, 3, 5, 6, 7]),
    ([2, 4, 6, 7], [0, 1, 2, 3, 4], [0, 2, 4, 7]),
    ([0, 3, 4, 5, 7], [0, 1, 3, 5, 7], [0, 1, 2, 5, 6]),
)
"""Where each rank runs in each step; the rest it skips."""


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, dtype=F64) for _ in set(ORDER))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64))

    def forward(self, hidden: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
        for place in places:
            hidden = torch.tanh(self.layers[ORDER[place]](hidden))
        return hidden


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    inputs = torch.linspace(-1, 1, 6, dtype=F64).view(2, 3).requires_grad_()
    loss: torch.Tensor = model(inputs * (rank + 1), PLACES[step][rank]).square().sum()
    return loss


def test_ranks_may_skip_different_uses_of_a_unit_in_the_last_backward() -> None:
    def run(comm: Communicator) -> list[Parts]:
        model = Shared()
        policy = ShardPolicy(stage=3, units=by_class(nn.Linear), live_units=1)
        parallel = data_parallel(model, Mesh(comm, MeshShape(dp=comm.size)), policy)
        found: list[Parts] = []
        for step in range(len(PLACES)):
            parallel.zero_grad()
            parallel.last_backward()
            loss_of(model, step, comm.rank).backward()
            parallel.reduce()
            parallel.wait()
            pieces = parallel.pieces.values()
            parts: Parts = []
            for piece in pieces:
                assert piece.parameter.grad is not None
                parts.append((piece.spec, piece.parameter.grad.clone()))
            found.append(parts)
        return found

    with pytest.warns(GatherOrderWarning):
        ranks = LocalWorld(3).run(run)

    for step in range(len(PLACES)):
        plain = Shared()
        for rank in range(3):
            loss_of(plain, step, rank).backward()
        sums = assemble([found[step] for found in ranks])
        for name, parameter in plain.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(sums[name], wanted, rtol=1e-10, atol=1e-12)
