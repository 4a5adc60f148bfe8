"""Profiles see what autograd saves, and leave the module as it was."""

import copy

import pytest
import torch
from torch import nn

from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    Offload,
    OperatorCosts,
    keep_all_plan,
    plan_operators,
    profile,
    simulate_chain,
)
from trainwright.checkpointing.errors import PlanError
from trainwright.checkpointing.testing.runners import live_saved_bytes

# Shapes: B batch, D model.


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(0.25)

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(self.norm(hidden_BD)))
        return hidden_BD + self.dropout(self.down(inner))


class OwnNoise(nn.Module):
    """Draws from a generator of its own, which nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


STACKS = {
    "linear and relu": [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()],
    "blocks": [Block(), Block(), Block()],
    "norms": [nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU()],
}


@pytest.mark.parametrize("name", STACKS)
def test_bytes_of_keeping_all_are_those_that_hooks_see(name):
    layers = nn.Sequential(*STACKS[name])
    sample = torch.randn(32, 8, requires_grad=True)

    costs = profile(layers, sample, repeats=1)

    outside = [*layers.parameters(), *layers.buffers()]
    seen = live_saved_bytes(lambda: layers(sample), outside)
    claimed = simulate_chain(keep_all_plan(len(layers)), costs).held_bytes
    assert isinstance(costs, ChainCosts)
    assert claimed == seen
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in costs.layers)


def test_a_profile_disturbs_nothing():
    layers = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), Block())
    before = copy.deepcopy(layers.state_dict())
    state = torch.get_rng_state()

    profile(layers, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), repeats=2)

    assert torch.equal(torch.get_rng_state(), state)
    after = layers.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in layers.parameters())


def test_what_global_generators_and_buffers_replay_can_be_recomputed_and_nothing_else():
    layers = [nn.Dropout(0.5), nn.BatchNorm1d(8), OwnNoise(), nn.Linear(8, 8)]

    costs = profile(layers, torch.randn(16, 8, requires_grad=True), repeats=1)

    assert [layer.recomputable for layer in costs.layers] == [True, True, False, True]


def test_operators_are_those_that_ran_with_what_they_read_and_save():
    costs = profile(Block(), torch.randn(32, 8), repeats=1, choices=[Offload("cpu", 1e9, 1e9)])

    assert isinstance(costs, OperatorCosts)
    found = {each.name: each for each in costs.operators}
    assert found["gelu.0"].inputs == ("addmm.0",)
    assert found["gelu.0"].output_bytes == 32 * 32 * 4
    assert found["addmm.0"].needed  # by gelu
    assert not found["addmm.1"].needed  # dropout keeps its mask only
    random = [each for each in costs.operators if not each.recomputable]
    assert [each.needed for each in random] == [True]
    total = sum(each.output_bytes for each in costs.operators if each.needed)
    for budget in range(random[0].output_bytes, total, 1024):
        made = plan_operators(costs, budget)
        assert random[0].name in made.kept


def test_changes_in_place_belong_to_the_operator_that_made_the_storage():
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + 1)[:, :4].relu_().mul(x[:, :4])

    costs = profile(InPlace(), torch.randn(4, 8, requires_grad=True), repeats=1)

    assert [each.name for each in costs.operators] == ["add.Tensor.0", "mul.Tensor.0"]
    assert costs.operators[1].inputs == ("add.Tensor.0",)


def test_a_module_that_takes_another_way_each_time_is_refused():
    class Alternating(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x.exp() if self.calls % 2 else x.sin()

    with pytest.raises(PlanError, match="other operators"):
        profile(Alternating(), torch.randn(3, requires_grad=True))


def test_repeats_must_be_a_positive_number():
    with pytest.raises(PlanError, match="repeats"):
        profile(Block(), torch.randn(2, 8), repeats=0)
    with pytest.raises(PlanError, match="at least one layer"):
        profile([], torch.randn(2, 8))
