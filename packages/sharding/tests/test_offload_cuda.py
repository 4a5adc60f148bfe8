"""Offload from a GPU; run where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from trainwright.collectives import SingleCommunicator
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.data import (
    ShardPolicy,
    by_class,
    data_parallel,
    offloaded_step,
    parameter_groups,
)
from trainwright.sharding.offload import Offload, offload_to_folder, offload_to_host

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def train(stage: int, offload: Offload | None, steps: int = 5) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, device="cuda") for _ in range(6)]
    model = nn.Sequential(*layers)
    mesh = Mesh(SingleCommunicator(device=torch.device("cuda")), MeshShape())
    policy = ShardPolicy(
        stage=stage,
        units=by_class(nn.Linear),
        parameter_dtype=lambda name, parameter: torch.bfloat16,
    )
    parallel = data_parallel(model, mesh, policy, offload=offload)
    optimizer = torch.optim.AdamW(parameter_groups(parallel, list(model.parameters())), fused=True)
    stepping = optimizer if offload is None else offloaded_step(optimizer, [parallel], offload)
    inputs = torch.linspace(-1, 1, 8 * 256, device="cuda").view(8, 256).bfloat16()
    for _ in range(steps):
        parallel.zero_grad()
        parallel.last_backward()
        model(inputs).float().square().sum().backward()
        parallel.reduce()
        parallel.wait()
        stepping.step()
        parallel.publish()
    parallel.await_weights()
    for name, piece in parallel.pieces.items():
        assert piece.parameter.device.type == ("cuda" if offload is None else "cpu"), name
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_a_gpu_trains_with_states_kept_by_its_host(
    stage: int, to_file: bool, tmp_path: Path
) -> None:
    weights = stage == 3
    if to_file:
        offload = offload_to_folder(tmp_path, weights=weights)
    else:
        offload = offload_to_host(weights=weights)

    found, wanted = train(stage, offload), train(stage, None)

    # The host's AdamW and the GPU's round differently before weights are rounded to bfloat16.
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=2**-7, atol=1e-3)
