"""Layers of experts on drawn meshes compute loops over experts in one process."""

import pytest
import torch
from hypothesis import example, given, settings

from trainwright.collectives import LocalWorld, random
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.expert import Routing
from trainwright.sharding.expert.testing import (
    check_experts_compute_the_plain_mixture,
    expert_cases,
)
from trainwright.sharding.expert.testing_plain import ExpertCase

LIMITED = Routing(4, 2, capacity_factor=0.6)


@settings(max_examples=10)
@given(expert_cases())
@example(ExpertCase("dp=2,ep=2", Routing(4, 2)))
@example(ExpertCase("dp=2,tp=2,ep=2", LIMITED, padding=True))
@example(ExpertCase("dp=2,cp=2,tp=2,ep=4", LIMITED, zigzag=True, sequence=True, length=7))
@example(ExpertCase("tp=4,ep=2,etp=2", Routing(4, 1, normalize=False), length=1, batch=1))
def test_experts_on_any_mesh_compute_the_plain_mixture(case):
    check_experts_compute_the_plain_mixture(case)


@pytest.mark.long
@settings(max_examples=150)
@given(expert_cases())
def test_experts_on_many_meshes_compute_the_plain_mixture(case):
    check_experts_compute_the_plain_mixture(case)


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,ep=2", "tp=2"])
def test_an_evaluation_computes_what_training_does_and_counts_nothing(layout):
    def run(world):
        case = ExpertCase(layout, LIMITED)
        mesh = Mesh(world, case.shape)
        layer = case.build(mesh)
        layer.reset_parameters(random.Key(0, "layer"), 1.0)
        hidden = case.part(mesh, case.draw("hidden", 4, 6, 5))
        trained, report = layer(hidden)
        layer.eval()
        with torch.no_grad():
            output, again = layer(hidden)
        assert torch.equal(layer.step_counts, report.counts)
        assert torch.equal(again.counts, report.counts)
        return not output.requires_grad and torch.equal(output, trained)

    size = MeshShape.parse(layout).world_size
    assert LocalWorld(size).run(run) == [True] * size
