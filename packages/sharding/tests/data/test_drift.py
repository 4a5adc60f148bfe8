"""A16: what is repeated on several ranks is found as soon as one of them has other bits."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import (
    DataParallel,
    Mesh,
    MeshShape,
    ParameterPlacement,
    Partial,
    ReplicaMismatchError,
    ShardPolicy,
    by_class,
    data_parallel,
)
from trainwright.sharding.data.replicas import check_replicas
from trainwright.sharding.data.testing import Network, NetworkPlan, network_plans, wrap
from trainwright.sharding.testing import mesh_shapes


@settings(max_examples=10)
@given(
    plan=network_plans([torch.float64, torch.bfloat16]),
    shape=mesh_shapes(8, ("dp", "cp", "tp")) | mesh_shapes(8, ("dp", "tp"), hybrid=True),
    policy=st.builds(
        ShardPolicy,
        stage=st.sampled_from([0, 1, 2, 3]),
        units=st.sampled_from([None, by_class(nn.Linear)]),
        alignment=st.integers(1, 3),
    ),
    data=st.data(),
)
def test_equal_replicas_pass_and_one_changed_piece_is_named_with_its_ranks(
    plan: NetworkPlan, shape: MeshShape, policy: ShardPolicy, data: st.DataObject
) -> None:
    changed = data.draw(st.integers(0, shape.world_size - 1))

    def run(world: Communicator) -> tuple[str, str]:
        mesh = Mesh(world, shape)
        parallel = data_parallel(Network(plan), mesh, policy, hooks=False)
        check_replicas(parallel)
        named = ""
        if world.rank == changed:
            pieces = {**parallel.pieces, **parallel.frozen}
            for name, piece in pieces.items():
                repeats = mesh.size(*piece.spec.replicated) if piece.spec.replicated else 1
                if repeats > 1:
                    with torch.no_grad():
                        piece.parameter.view(-1)[-1] += 1
                    named = name
                    break
        try:
            check_replicas(parallel)
        except ReplicaMismatchError as error:
            return named, str(error)
        return named, ""

    results = LocalWorld(shape.world_size).run(run)

    named = results[changed][0]
    assert len({said for _, said in results}) == 1
    assert (named in results[0][1]) if named else not results[0][1]
    assert not named or f"ranks {changed}" in results[0][1]


def flip(tensor: torch.Tensor) -> None:
    """Change the last bit of the last element."""
    flat = tensor.detach().view(-1)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat.view(integers[tensor.itemsize])[-1] ^= 1


class Model(nn.Module):
    """Trained and frozen parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.fixed = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.register_buffer("count", torch.tensor(3.0))
        nn.init.ones_(self.layer.weight)
        nn.init.ones_(self.layer.bias)
        nn.init.ones_(self.fixed.weight)


def master(parallel: DataParallel) -> torch.Tensor:
    return parallel.pieces["layer.weight"].parameter


def weight(parallel: DataParallel) -> torch.Tensor:
    return parallel.module.layer.weight


def frozen(parallel: DataParallel) -> torch.Tensor:
    return parallel.module.fixed.weight


def buffer(parallel: DataParallel) -> torch.Tensor:
    return parallel.module.count


def kept_weight(parallel: DataParallel) -> torch.Tensor:
    (bucket,) = [b for b in parallel.units[""].buckets if b.members[0].name.startswith("layer")]
    return bucket.weights.kept


@pytest.mark.parametrize(
    ("text", "stage", "choose", "named"),
    [
        ("dp=3", 0, master, "masters of layer.weight on ranks 0, 2 against ranks 1"),
        ("dp=3", 0, weight, "weights of layer.weight on ranks 0, 2 against ranks 1"),
        ("dp=3", 1, weight, "weights of layer.weight on ranks 0, 2 against ranks 1"),
        ("dp=3", 2, frozen, "parameter fixed.weight on ranks 0, 2 against ranks 1"),
        ("dp=3", 3, buffer, "buffer count on ranks 0, 2 against ranks 1"),
        ("dp=4,dp_shard=2", 3, master, "masters of layer.weight on ranks 1 against ranks 3"),
        ("dp=4,dp_shard=2", 3, kept_weight, "weights of layer.bias, layer.weight on ranks 1 aga"),
        ("dp=2,tp=2", 3, master, "masters of layer.weight on ranks 0 against ranks 1"),
        ("dp=2,cp=2", 1, weight, "weights of layer.weight on ranks 0, 2, 3 against ranks 1"),
    ],
)
def test_one_flipped_bit_is_found_wherever_it_is(
    text: str, stage: int, choose: Callable[[DataParallel], torch.Tensor], named: str
) -> None:
    def run(world: Communicator) -> None:
        policy = ShardPolicy(stage=stage, alignment=1)
        mesh = Mesh(world, MeshShape.parse(text))
        parallel = data_parallel(Model(), mesh, policy, hooks=False)
        if world.rank == 1:
            flip(choose(parallel))
        with pytest.raises(ReplicaMismatchError, match=re.escape(named)):
            check_replicas(parallel)

    LocalWorld(MeshShape.parse(text).world_size).run(run)


def test_a_weight_tied_over_pipeline_ends_is_compared_between_them() -> None:
    def run(world: Communicator) -> None:
        mesh = Mesh(world, MeshShape(pp=3, dp=2))
        module = nn.Linear(3, 4)
        nn.init.ones_(module.weight)
        nn.init.constant_(module.bias, mesh.coordinate("pp"))
        tied = ParameterPlacement.replicated((4, 3), {"pp": Partial()})
        placements = {"weight": tied} if mesh.coordinate("pp") != 1 else None
        parallel = data_parallel(module, mesh, ShardPolicy(stage=1, alignment=1), placements)
        check_replicas(parallel)
        if world.rank == 5:
            flip(parallel.pieces["weight"].parameter)
            parallel.publish()
        elif world.rank == 4:
            parallel.publish()
        with pytest.raises(ReplicaMismatchError, match="weight on ranks 1 against ranks 5"):
            check_replicas(parallel)

    LocalWorld(6).run(run)


def test_shards_may_differ_and_one_rank_has_nothing_to_compare() -> None:
    check_replicas(wrap(nn.Linear(2, 2)))

    def run(world: Communicator) -> None:
        parallel = wrap(nn.Linear(4, 4), world, stage=3)
        with torch.no_grad():
            for piece in parallel.pieces.values():
                piece.parameter.add_(world.rank)
        check_replicas(parallel)

    LocalWorld(2).run(run)
