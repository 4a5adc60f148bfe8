"""What a module itself gives away of its weights at stage 3."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import LifecycleError, ShardPolicy, by_class, data_parallel
from trainwright.sharding.mesh import Mesh, MeshShape


def make_model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return model


@pytest.mark.parametrize("hooks", [True, False])
def test_released_weights_are_neither_exported_nor_copied_and_gathered_ones_outlive_their_release(
    hooks: bool,
) -> None:
    plain = make_model().state_dict()

    def run(comm: Communicator) -> None:
        model = make_model()
        policy = ShardPolicy(stage=3, units=by_class(nn.Linear))
        parallel = data_parallel(model, Mesh(comm, MeshShape(dp=2)), policy, hooks=hooks)
        with pytest.raises(LifecycleError, match=r"state_dict\(\) .* NaN for 0\..*full_state"):
            model.state_dict()
        with pytest.raises(LifecycleError, match=r"NaN for 2\."):
            model[2].state_dict()
        with pytest.raises(LifecycleError, match=r"a copy .* await_weights"):
            copy.deepcopy(model)

        parallel.await_weights()
        state, copied = model.state_dict(), copy.deepcopy(model)
        assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight
        parallel.release()

        for name, value in plain.items():
            assert torch.equal(state[name], value)
            assert torch.equal(copied.state_dict()[name], value)

    LocalWorld(2).run(run)
