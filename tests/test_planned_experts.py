"""Plans of recomputation that nest regions hold for layers that route tokens."""

from __future__ import annotations

import torch

from trainwright.checkpointing.activations import LayerRunner, follow, keep_all
from trainwright.checkpointing.activations.planning import ChainPlan, Kept, Region
from trainwright.collectives import Communicator, LocalWorld, random
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.expert import MixtureOfExperts, Routing, capture_routing


class Layer(torch.nn.Module):
    """A residual mixture of experts."""

    def __init__(self, mesh: Mesh, number: int) -> None:
        super().__init__()
        self.experts = MixtureOfExperts(4, 4, Routing(4, 2), mesh, dtype=torch.float64)
        self.experts.reset_parameters(random.Key(number, "layer"), 0.5)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        return hidden_BSD + torch.as_tensor(self.experts(hidden_BSD)[0])


def gradients(world: Communicator, runner: LayerRunner) -> list[torch.Tensor]:
    """Return the gradients of a chain of layers and of its input."""
    mesh = Mesh(world, MeshShape.parse("dp=2,ep=2"))
    layers = [Layer(mesh, number) for number in range(4)]
    key = random.Key(world.rank, "hidden")
    hidden_BSD = random.normal(key, (2, 3, 4), dtype=torch.float64).requires_grad_()
    runner(layers, hidden_BSD).square().sum().backward()
    found = [hidden_BSD, *(p for layer in layers for p in layer.parameters())]
    return [torch.as_tensor(tensor.grad) for tensor in found]


def test_regions_within_regions_of_a_plan_send_tokens_where_the_forward_did() -> None:
    inner = Region([Kept(0), Region([Kept(1)]), Kept(2)])
    plan = ChainPlan([Region([inner, Kept(3)])])
    runner = follow(plan, captures=[capture_routing])

    expected, found = (
        LocalWorld(2).run(lambda world, by=by: gradients(world, by)) for by in (keep_all(), runner)
    )

    for one, other in zip(expected, found, strict=True):
        assert all(map(torch.equal, one, other))
