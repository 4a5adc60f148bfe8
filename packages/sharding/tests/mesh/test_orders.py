"""Orders of axes: they say which rank stands where, and change nothing else."""

from __future__ import annotations

from itertools import pairwise, permutations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import (
    Mesh,
    MeshShape,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    one_norm,
    redistribute,
)
from trainwright.sharding.data import ShardPolicy, data_parallel, full_state_dict
from trainwright.sharding.data.testing import Network, NetworkPlan
from trainwright.sharding.mesh import DENSE_AXES, EXPERT_AXES, HYBRID_AXES
from trainwright.sharding.testing import mesh_shapes, orders

PRODUCTS = (
    *((axis,) for axis in (*DENSE_AXES, *EXPERT_AXES[1:])),
    ("dp", "cp"), ("dp", "tp"), ("pp", "tp"), ("dp", "cp", "tp"), ("edp", "ep"), DENSE_AXES,
)  # fmt: skip


@given(mesh_shapes(max_world_size=24), orders())
def test_an_order_only_says_which_rank_stands_at_a_place(shape: MeshShape, order) -> None:
    plain = shape
    shape = attrs.evolve(shape, order=order)
    places = [shape.coordinates(rank) for rank in range(shape.world_size)]
    at = [plain.rank(**{axis: place[axis] for axis in DENSE_AXES}) for place in places]
    back = {number: rank for rank, number in enumerate(at)}

    assert sorted(at) == list(range(shape.world_size))
    for rank, place in enumerate(places):
        assert shape.rank(**{axis: place[axis] for axis in DENSE_AXES}) == rank
        assert place == plain.coordinates(at[rank])
        for axes in PRODUCTS:
            assert shape.ranks(rank, *axes) == tuple(back[n] for n in plain.ranks(at[rank], *axes))


@given(mesh_shapes(max_world_size=24, hybrid=True), orders(split=True))
def test_the_parts_of_a_split_dp_can_stand_apart(shape: MeshShape, order) -> None:
    shape = attrs.evolve(shape, order=order)

    seen = set()
    for rank in range(shape.world_size):
        place = shape.coordinates(rank)
        assert place["dp"] == place["dp_replicate"] * shape.dp_shard + place["dp_shard"]
        seen.add(tuple(place[axis] for axis in HYBRID_AXES))
        dp = [shape.coordinates(other)["dp"] for other in shape.ranks(rank, "dp")]
        assert dp == list(range(shape.dp))
    assert len(seen) == shape.world_size
    assert MeshShape.parse(str(shape)) == shape


def test_the_parts_of_a_dp_that_is_ordered_whole_are_neighbours() -> None:
    shape = MeshShape(dp=4, tp=2, dp_shard=2, order="pp/cp/tp/dp")

    assert shape.ranks(4, "dp") == (4, 5, 6, 7)
    assert shape.ranks(4, "dp_shard") == (4, 5)
    assert shape.ranks(4, "dp_replicate") == (4, 6)


@pytest.mark.parametrize("order", list(permutations(DENSE_AXES)))
def test_ranks_along_the_innermost_axis_are_neighbours_and_each_axis_steps_over_those_inside(
    order: tuple[str, ...],
) -> None:
    shape = MeshShape(pp=2, dp=3, cp=2, tp=2, order=order)

    step = 1
    for axis in reversed(order):
        for first, second in pairwise(shape.ranks(0, axis)):
            assert second - first == step
        step *= shape.size(axis)
    assert MeshShape.parse(str(shape)) == shape
    assert eval(repr(shape)) == shape


@settings(max_examples=8)
@given(st.data())
def test_communicators_count_ranks_by_place_in_every_order(data: st.DataObject) -> None:
    shape = data.draw(mesh_shapes(max_world_size=8))
    shape = attrs.evolve(shape, order=data.draw(orders()))

    def run(world: Communicator) -> list[tuple[int, ...]]:
        mesh = Mesh(world, shape)
        found = []
        for axes in PRODUCTS:
            comm = mesh.communicator(*axes)
            ranks = torch.empty(comm.size, dtype=torch.int64)
            comm.all_gather(ranks, torch.tensor([world.rank])).wait()
            assert tuple(ranks.tolist()) == mesh.ranks(*axes)
            assert comm.rank == mesh.ranks(*axes).index(mesh.rank)
            found.append(tuple(ranks.tolist()))
        if mesh.coordinate("pp") in (0, shape.pp - 1):
            ends = mesh.communicator("pp_ends")
            assert ends.rank == (0 if mesh.coordinate("pp") == 0 else 1)
        return found

    for rank, found in enumerate(LocalWorld(shape.world_size).run(run)):
        place = shape.coordinates(rank)
        for axes, ranks in zip(PRODUCTS, found, strict=True):
            view = DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES
            places = [tuple(shape.coordinates(other)[axis] for axis in view) for other in ranks]
            assert places == sorted(places)
            fixed = [axis for axis in view if axis not in axes]
            assert all(shape.coordinates(other)[a] == place[a] for other in ranks for a in fixed)


@settings(max_examples=4)
@given(
    shape=st.sampled_from([MeshShape(dp=4, dp_shard=2), MeshShape(dp=2, tp=2, dp_shard=2)]),
    order=orders(split=True),
    stage=st.sampled_from([1, 3]),
)
def test_training_does_not_depend_on_the_order(shape: MeshShape, order, stage: int) -> None:
    shape = attrs.evolve(shape, order=order)
    plan = NetworkPlan(hidden=5, depth=2)
    rows = torch.linspace(-1, 1, 8 * plan.inputs, dtype=plan.dtype).view(shape.dp, -1, plan.inputs)

    def run(world: Communicator) -> tuple[float, dict[str, torch.Tensor]]:
        mesh = Mesh(world, shape)
        parallel = data_parallel(Network(plan), mesh, ShardPolicy(stage=stage, alignment=1))
        optimizer = torch.optim.SGD([p.parameter for p in parallel.pieces.values()], lr=0.1)
        parallel.last_backward()
        parallel.module(rows[mesh.coordinate("dp")]).square().sum().backward()
        parallel.reduce()
        parallel.wait()
        norm = float(one_norm(mesh, parallel.pieces.values()).norm)
        optimizer.step()
        parallel.publish()
        return norm, full_state_dict(parallel)

    serial = Network(plan)
    serial(rows.flatten(0, 1)).square().sum().backward()
    norm = torch.stack([p.grad.square().sum() for p in serial.parameters()]).sum().sqrt()
    torch.optim.SGD(serial.parameters(), lr=0.1).step()
    results = LocalWorld(4).run(run)
    for found, _ in results:
        assert abs(found / float(norm) - 1) < 1e-12
    state = results[0][1]
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


@settings(max_examples=8)
@given(orders())
def test_what_a_rank_holds_of_a_cut_tensor_depends_on_its_place_alone(order) -> None:
    shape = MeshShape(dp=2, cp=2, tp=2, order=order)
    whole = torch.arange(16.0)

    def run(world: Communicator) -> list[float]:
        mesh = Mesh(world, shape)
        cut = {"dp": Shard(0), "cp": Replicate(), "tp": Shard(0)}
        part = redistribute(whole, mesh, {}, cut)
        place = mesh.coordinate("dp") * 2 + mesh.coordinate("tp")
        assert part.tolist() == whole.chunk(4)[place].tolist()
        return redistribute(part, mesh, cut, {"cp": Partial()}).tolist()

    for rank, terms in enumerate(LocalWorld(8).run(run)):
        assert terms == (whole * (shape.coordinates(rank)["cp"] == 0)).tolist()


def test_an_order_costs_no_more_groups_than_it_needs() -> None:
    def run(world: Communicator) -> tuple[bool, ...]:
        mesh = Mesh(world, MeshShape(dp=2, tp=2, order="pp/cp/tp/dp"))
        return (
            mesh.communicator("dp") is mesh.communicator("edp"),
            mesh.communicator("tp") is mesh.communicator("etp"),
            mesh.communicator("dp", "tp") is mesh.communicator("pp", "edp", "etp"),
            mesh.communicator("dp", "tp") is not world,
        )

    assert LocalWorld(4).run(run) == [(True,) * 4] * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MeshShape(order=("pp", "dp", "tp")),
            r"leaves out cp; name each of pp, dp, cp, tp once, .*'cp/pp/dp/tp' would do",
        ),
        (lambda: MeshShape(order="pp/dp/dp/tp"), "names axis dp twice"),
        (lambda: MeshShape(order="pp/dq/cp/tp"), "unknown axis 'dq'.*did you mean 'dp'"),
        (lambda: MeshShape(order="tp-cp-dp-pp"), "innermost first, write 'pp/dp/cp/tp'"),
        (lambda: MeshShape(order="pp/dp/ep/cp/tp"), "ep has no order of its own"),
        (lambda: MeshShape(order="dp/dp_shard/pp/cp/tp"), "dp is dp_replicate and dp_shard"),
        (
            lambda: MeshShape(dp=4, order="dp_replicate/pp/dp_shard/cp/tp"),
            "dp=4 is not split; choose dp_shard, or name dp",
        ),
        (lambda: MeshShape.parse("dp=2,order=tp/dp"), "order 'tp/dp' leaves out pp, cp"),
        (lambda: MeshShape.parse("order=pp/dp/cp/tp,order=pp/dp/cp/tp"), "names axis order twice"),
    ],
)
def test_an_order_without_each_axis_once_is_refused(make, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()


@pytest.mark.parametrize(
    ("shape", "world_size", "message"),
    [
        (MeshShape(pp=2, dp=3, tp=2), 8, "with this pp and tp, dp must be 2"),
        (MeshShape(pp=2, dp=4, tp=3), 8, "with this pp and dp, tp must be 1"),
        (MeshShape(pp=5, dp=3, tp=3), 8, "no change of one axis fits; near it is pp=4, tp=2"),
        (MeshShape(pp=3, dp=2, tp=8), 20, "one axis fits; near it is pp=2, dp=2, tp=5"),
        (MeshShape(dp=4, dp_shard=4), 6, "no change of one axis fits; the sizes must multiply"),
        (MeshShape(dp=4, ep=4), 6, "no change of one axis fits; the sizes must multiply to 6"),
        (MeshShape(dp=4, tp=3, ep=4), 8, "with this dp, tp must be 2"),
    ],
)
def test_a_world_of_another_size_is_told_which_sizes_fit(
    shape: MeshShape, world_size: int, message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        shape.check(world_size)
