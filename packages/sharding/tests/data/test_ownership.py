"""Any rank can say what every other rank keeps."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, ShardSpec
from trainwright.sharding import Mesh, MeshShape, ShardingError, ShardPolicy, data_parallel
from trainwright.sharding.data.ownership import piece_spec_on
from trainwright.sharding.data.testing import Network, NetworkPlan, network_plans, wrap
from trainwright.sharding.testing import mesh_shapes


@settings(max_examples=8)
@given(
    plan=network_plans(),
    shape=mesh_shapes(8, ("dp", "cp")) | mesh_shapes(8, ("dp", "cp"), hybrid=True),
    stage=st.sampled_from([0, 1, 2, 3]),
    bucket_bytes=st.sampled_from([1, 200, 10**6]),
    alignment=st.integers(1, 4),
)
def test_the_plan_says_the_pieces_of_every_rank(
    plan: NetworkPlan, shape: MeshShape, stage: int, bucket_bytes: int, alignment: int
) -> None:
    policy = ShardPolicy(stage=stage, bucket_bytes=bucket_bytes, alignment=alignment)

    def run(world: Communicator) -> tuple[dict[str, ShardSpec], list[dict[str, ShardSpec]]]:
        mesh = Mesh(world, shape)
        parallel = data_parallel(Network(plan), mesh, policy, hooks=False)
        axes = tuple(axis for axis in ("dp", "cp") if mesh.size(axis) > 1)
        cut = {
            name: parameter
            for name, parameter in parallel.module.named_parameters()
            if parameter.numel() and (parameter.requires_grad or stage == 3)
        }
        said = []
        for rank in range(mesh.size("dp_shard", "cp") if stage else 1):
            specs = {
                name: piece_spec_on(
                    parallel.layout,
                    ShardSpec.full(name, parameter.shape, axes),
                    name,
                    rank,
                    dp_replicate=mesh.size("dp_replicate"),
                )
                for name, parameter in cut.items()
            }
            said.append({name: spec for name, spec in specs.items() if spec is not None})
        held = {**parallel.pieces, **parallel.frozen}
        kept = {name: piece.spec for name, piece in held.items() if name in cut}
        if mesh.size("dp_shard", "cp") == 1:
            # One rank keeps all: whoever differs along dp differs along dp_replicate.
            kept = {name: attrs.evolve(spec, replicated=axes) for name, spec in kept.items()}
        return kept, said

    results = LocalWorld(shape.world_size).run(run)

    for _, said in results:
        for rank, (kept, _) in enumerate(results):
            assert said[rank % len(said)] == kept


def test_a_name_or_rank_that_the_plan_does_not_have_is_refused() -> None:
    parallel = wrap(Network(NetworkPlan(frozen=True)))
    spec = ShardSpec.full("first.weight", (5, 3))

    with pytest.raises(ShardingError, match=r"first\.weight has no place .* frozen"):
        piece_spec_on(parallel.layout, spec, "first.weight", 0)


def test_a_rank_beyond_the_cut_is_refused() -> None:
    def run(world: Communicator) -> None:
        parallel = wrap(torch.nn.Linear(3, 3), world, stage=1)
        with pytest.raises(ShardingError, match=r"weight is cut over 2 data ranks, 0\.\.1, got"):
            piece_spec_on(parallel.layout, ShardSpec.full("weight", (3, 3)), "weight", 2)

    LocalWorld(2).run(run)
