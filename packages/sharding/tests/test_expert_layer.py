"""Layers of experts on drawn meshes compute loops over experts in one process."""

from hypothesis import example, given, settings

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
