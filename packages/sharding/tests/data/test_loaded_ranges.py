"""Each rank takes its own range of weights that the user has put into the module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import ShardPolicy, data_parallel
from trainwright.sharding.mesh import Mesh, MeshShape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [1, 3])
def test_weights_put_into_the_module_come_back_element_by_element(
    stage: int, dtype: torch.dtype
) -> None:
    # No two elements are equal: a range of another rank would show.
    wanted = torch.arange(35).view(5, 7).to(dtype)

    def run(comm: Communicator) -> list[torch.Tensor]:
        model = nn.Linear(7, 5, bias=False).to(dtype)
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        parallel = data_parallel(model, mesh, ShardPolicy(stage=stage, alignment=1), hooks=False)
        parallel.await_weights()
        with torch.no_grad():
            model.weight.copy_(wanted)
        parallel.load_masters()
        kept = [piece.parameter.detach().to(dtype) for piece in parallel.pieces.values()]
        parallel.publish()
        parallel.release()
        parallel.await_weights()
        return [model.weight.detach().clone(), *kept]

    ranks = LocalWorld(3).run(run)

    assert all(torch.equal(weight, wanted) for weight, *_ in ranks)
    assert torch.equal(torch.cat([kept.view(-1) for _, kept in ranks]), wanted.view(-1))
