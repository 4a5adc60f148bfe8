"""The mesh: where ranks stand, which groups they form, and what is refused."""

import attrs
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.sharding import (
    Mesh,
    MeshShape,
    NotAvailableError,
    Replicate,
    Shard,
    ShardingError,
    redistribute,
)
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.mesh import DENSE_AXES, EXPERT_AXES, HYBRID_AXES
from trainwright.sharding.testing import layouts_of, mesh_shapes


@given(mesh_shapes(max_world_size=24))
def test_coordinates_and_ranks_are_one_to_one_in_both_views(shape):
    places = [shape.coordinates(rank) for rank in range(shape.world_size)]

    for view in (DENSE_AXES, EXPERT_AXES):
        seen = {tuple(place[axis] for axis in view) for place in places}
        assert len(seen) == shape.world_size
        assert all(0 <= place[axis] < shape.size(axis) for place in places for axis in view)
    for rank, place in enumerate(places):
        assert shape.rank(**{axis: place[axis] for axis in DENSE_AXES}) == rank


@given(mesh_shapes(max_world_size=24))
def test_both_views_cut_each_pipeline_stage(shape):
    assert shape.size("dp", "cp", "tp") == shape.size("edp", "ep", "etp")
    assert shape.world_size == shape.pp * shape.size("edp", "ep", "etp")


@given(mesh_shapes(max_world_size=24))
def test_a_shape_survives_the_round_trip_through_text(shape):
    assert MeshShape.parse(str(shape)) == shape


def test_tensor_parallel_ranks_are_neighbours():
    shape = MeshShape(pp=2, dp=2, cp=2, tp=2)

    groups = {shape.ranks(rank, "tp") for rank in range(16)}

    assert groups == {(rank, rank + 1) for rank in range(0, 16, 2)}
    assert shape.coordinates(13) == {
        "pp": 1, "dp": 1, "cp": 0, "tp": 1, "edp": 2, "ep": 0, "etp": 1
    }  # fmt: skip


def test_expert_parallelism_does_not_multiply_the_world():
    shape = MeshShape.parse("dp=4,tp=2,ep=4")

    assert shape.world_size == 8
    assert (shape.edp, shape.ep, shape.etp) == (1, 4, 2)


@given(st.data())
@example(None)
def test_communicators_join_the_ranks_that_differ_only_along_their_axes(data):
    shape = data.draw(mesh_shapes(max_world_size=8)) if data else MeshShape(dp=2, tp=2, pp=2, ep=2)
    products = [("dp",), ("tp",), ("pp",), ("cp",), ("dp", "cp"), ("tp", "dp"), ("edp",), ("ep",)]
    products += [("etp",), ("pp", "tp"), DENSE_AXES, ("ep", "edp"), ("pp", "ep", "etp")]

    def run(world):
        mesh = Mesh(world, shape)
        found = []
        for axes in products:
            comm = mesh.communicator(*axes)
            mine = torch.tensor([world.rank])
            ranks = torch.empty(comm.size, dtype=torch.int64)
            comm.all_gather(ranks, mine).wait()
            found.append((tuple(ranks.tolist()), mesh.ranks(*axes), comm.rank, comm.size))
        return found

    for rank, found in enumerate(LocalWorld(shape.world_size).run(run)):
        place = shape.coordinates(rank)
        for axes, (ranks, promised, own, size) in zip(products, found, strict=True):
            view = DENSE_AXES if set(axes) <= set(DENSE_AXES) else EXPERT_AXES
            fixed = [axis for axis in view if axis not in axes]
            expected = [
                other
                for other in range(shape.world_size)
                if all(shape.coordinates(other)[axis] == place[axis] for axis in fixed)
            ]
            assert list(ranks) == list(promised) == expected
            assert ranks[own] == rank
            assert size == shape.size(*axes)


@given(mesh_shapes(max_world_size=24, hybrid=True))
def test_a_split_dp_has_consecutive_dp_ranks_in_a_shard_group(shape):
    assert shape.dp == shape.dp_replicate * shape.dp_shard
    assert MeshShape.parse(str(shape)) == shape
    for rank in range(shape.world_size):
        place = shape.coordinates(rank)
        assert place["dp"] == place["dp_replicate"] * shape.dp_shard + place["dp_shard"]
        group = [shape.coordinates(other)["dp"] for other in shape.ranks(rank, "dp_shard")]
        first = place["dp_replicate"] * shape.dp_shard
        assert group == list(range(first, first + shape.dp_shard))
        assert shape.ranks(rank, "dp_replicate", "dp_shard") == shape.ranks(rank, "dp")


@given(st.data())
def test_communicators_of_a_split_dp_join_the_ranks_that_differ_only_along_their_axes(data):
    shape = data.draw(mesh_shapes(max_world_size=8, hybrid=True))
    products = [("dp_shard",), ("dp_replicate",), ("dp_shard", "cp"), ("dp_replicate", "dp_shard")]
    products += [("tp", "dp_replicate"), HYBRID_AXES, ("pp", "dp_shard", "tp")]

    def run(world):
        mesh = Mesh(world, shape)
        found = []
        for axes in products:
            comm = mesh.communicator(*axes)
            ranks = torch.empty(comm.size, dtype=torch.int64)
            comm.all_gather(ranks, torch.tensor([world.rank])).wait()
            found.append((tuple(ranks.tolist()), mesh.ranks(*axes), comm.rank, mesh.size(*axes)))
        places = {axis: mesh.coordinate(axis) for axis in HYBRID_AXES}
        assert places.items() <= mesh.coordinates.items()
        return found

    for rank, found in enumerate(LocalWorld(shape.world_size).run(run)):
        place = shape.coordinates(rank)
        for axes, (ranks, promised, own, size) in zip(products, found, strict=True):
            fixed = [axis for axis in HYBRID_AXES if axis not in axes]
            expected = [
                other
                for other in range(shape.world_size)
                if all(shape.coordinates(other)[axis] == place[axis] for axis in fixed)
            ]
            assert list(ranks) == list(promised) == expected
            assert ranks[own] == rank
            assert size == len(expected)


def test_without_a_split_dp_shard_is_all_of_dp_and_nothing_is_added():
    def run(world):
        splits = []

        class Counting(RecordingCommunicator):
            def split(self, color, key=0):
                splits.append(color)
                return super().split(color, key)

        mesh = Mesh(Counting(world, []), MeshShape(dp=2, tp=2))
        return (
            mesh.communicator("dp_shard") is mesh.communicator("dp"),
            mesh.communicator("tp", "dp_shard") is mesh.communicator("dp", "tp"),
            isinstance(mesh.communicator("dp_replicate"), SingleCommunicator),
            mesh.coordinate("dp_shard") == mesh.coordinate("dp"),
            mesh.size("dp_replicate") == 1,
            {"dp_replicate", "dp_shard"}.isdisjoint(mesh.coordinates),
            len(splits) == 2,
        )

    assert LocalWorld(4).run(run) == [(True,) * 7] * 4


def test_a_table_of_a_split_dp_shows_its_parts():
    lines = MeshShape(dp=4, dp_shard=2).table().splitlines()

    assert lines[0].split() == ["rank", "pp", "dp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert [line.split()[2:5] for line in lines[1:]] == [
        ["0", "0", "0"],
        ["1", "0", "1"],
        ["2", "1", "0"],
        ["3", "1", "1"],
    ]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_pipeline_ends_of_equal_other_coordinates_are_joined_and_no_other_stage(pp):
    shape = MeshShape(pp=pp, tp=2)

    def run(world):
        mesh = Mesh(world, shape)
        if mesh.coordinate("pp") not in (0, pp - 1):
            with pytest.raises(ShardingError, match=r"is on stage . of pp=.*ask for it only there"):
                mesh.communicator("pp_ends")
            return None
        comm = mesh.communicator("pp_ends")
        ranks = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(ranks, torch.tensor([world.rank])).wait()
        return ranks.tolist(), comm is mesh.communicator("pp")

    last = 2 * (pp - 1)
    found = LocalWorld(2 * pp).run(run)

    assert [ranks for ranks, _ in filter(None, found)] == (
        [[0], [1]] if pp == 1 else [[0, last], [1, last + 1]] * 2
    )
    assert not any(is_pp for _, is_pp in filter(None, found))
    assert sum(item is None for item in found) == 2 * max(pp - 2, 0)


def test_all_axes_together_are_the_world_and_an_axis_of_one_costs_nothing():
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        return (
            mesh.communicator("dp", "tp") is world,
            mesh.communicator("pp", "dp", "cp", "tp") is world,
            mesh.communicator("dp", "cp") is mesh.communicator("dp"),
            mesh.communicator("dp") is not mesh.communicator("tp"),
            isinstance(mesh.communicator("cp"), SingleCommunicator),
        )

    assert LocalWorld(4).run(run) == [(True,) * 5] * 4


def test_the_expert_tensor_axis_follows_tp_unless_it_is_said():
    shape = MeshShape(dp=2, tp=2)

    assert shape == MeshShape(dp=2, tp=2, etp=2)
    assert attrs.evolve(shape, tp=4).etp == 4
    assert attrs.evolve(shape, etp=1).edp == 4


def test_two_meshes_live_in_one_process():
    def run(world):
        first = Mesh(world, MeshShape(dp=2, tp=2))
        second = Mesh(world, MeshShape(pp=2, dp=2))
        return first.ranks("dp"), second.ranks("dp"), first.coordinates, second.coordinates

    results = LocalWorld(4).run(run)

    assert [result[0] for result in results] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [result[1] for result in results] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_scatter_and_gather_over_an_explicit_group_give_every_group_its_own_data_back():
    # SHD-07: groups {0,2} and {1,3} beside the innermost ones {0,1} and {2,3}.
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        sample = torch.arange(4.0) + 10 * mesh.coordinate("tp")
        part = redistribute(sample, mesh, {"dp": Replicate()}, {"dp": Shard(0)})
        return part.tolist(), redistribute(part, mesh, {"dp": Shard(0)}, {}).tolist()

    results = LocalWorld(4).run(run)

    assert [part for part, _ in results] == [[0.0, 1.0], [10.0, 11.0], [2.0, 3.0], [12.0, 13.0]]
    assert [whole for _, whole in results] == [[0, 1, 2, 3], [10, 11, 12, 13]] * 2


@given(st.data(), st.integers(1, 12))
def test_a_layout_drawn_for_a_world_has_that_many_ranks(data, world_size):
    shape = data.draw(layouts_of(world_size))

    shape.check(world_size)


def test_a_table_has_one_line_a_rank():
    lines = MeshShape(dp=2, tp=2).table().splitlines()

    assert lines[0].split() == ["rank", "pp", "dp", "cp", "tp"]
    assert [line.split() for line in lines[1:]] == [
        ["0", "0", "0", "0", "0"],
        ["1", "0", "0", "0", "1"],
        ["2", "0", "1", "0", "0"],
        ["3", "0", "1", "0", "1"],
    ]
    assert MeshShape(dp=2, ep=2).table().splitlines()[0].split()[-3:] == ["edp", "ep", "etp"]


def test_hybrid_sharding_with_experts_is_not_available():
    with pytest.raises(NotAvailableError, match="leave dp_shard out, or choose ep=1"):
        MeshShape(dp=4, dp_shard=2, ep=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MeshShape(pp=2, dp=3, tp=2).check(8),
            r"mesh pp=2 \* dp=3 \* tp=2 needs 12 ranks, got world_size=8; "
            "with this pp and tp, dp must be 2",
        ),
        (lambda: MeshShape(dp=3).check(8), "mesh dp=3 needs 3 ranks.*dp must be 8"),
        (lambda: MeshShape(pp=5, dp=3, tp=3).check(8), "no change of one axis fits"),
        (lambda: Mesh(SingleCommunicator(), MeshShape(dp=2)), "world_size=1; dp must be 1"),
        (lambda: MeshShape(dp=0), "dp must be a positive int, got 0"),
        (lambda: MeshShape(tp=2.0), "tp must be a positive int, got 2.0"),
        (lambda: MeshShape(dp=True), "got True"),
        (lambda: MeshShape(dp=3, ep=2), "must divide dp=3 .* = 3; with this etp, ep may be 1, 3"),
        (lambda: MeshShape(dp=2, etp=4), "choose a smaller etp"),
        (lambda: MeshShape(dp=4, dp_shard=3), "dp_shard=3 must divide dp=4;.* may be 1, 2, 4"),
        (lambda: MeshShape(dp=4, dp_shard=0), "dp_shard must be a positive int, got 0"),
        (lambda: MeshShape(dp=4).size("dp", "dp_shard"), "belong to two views"),
        (lambda: MeshShape(dp=4).size("dp_shart"), "did you mean 'dp_shard'"),
        (lambda: MeshShape.parse("dq=2"), "unknown axis 'dq'.*did you mean 'dp'"),
        (lambda: MeshShape.parse("dp=2,dp=2"), "names axis dp twice"),
        (lambda: MeshShape.parse("dp=two"), "dp needs a positive int, got 'dp=two'; write dp=2"),
        (lambda: MeshShape.parse("dp"), "write dp=2"),
        (lambda: MeshShape.parse("dp=" + "9" * 900), "dp needs a positive int"),
        (lambda: MeshShape.parse("dp=2147483647,ep=2"), "with this etp, ep may be 1, 2147483647"),
        (lambda: MeshShape(dp=2**53, dp_shard=3), "must be at most 2147483647 ranks"),
        (lambda: MeshShape(pp=2**16, tp=2**15), "must be at most 2147483647 ranks"),
        (lambda: MeshShape.parse("edp=2"), "unknown axis 'edp'"),
        (lambda: MeshShape(dp=2).size("ep", "dp"), "belong to two views"),
        (lambda: MeshShape(dp=2).coordinates(2), "rank must be in 0..1, got 2"),
        (lambda: MeshShape(dp=2).rank(dp=2), "dp=2 is outside 0..1"),
        (lambda: Mesh(SingleCommunicator(), MeshShape()).communicator(), "at least one axis"),
        (lambda: Mesh(SingleCommunicator(), MeshShape()).coordinate("xp"), "unknown axis 'xp'"),
    ],
)
def test_what_cannot_be_says_the_rule_and_the_way_out(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


def test_a_text_that_is_longer_than_any_layout_is_refused_in_few_words() -> None:
    with pytest.raises(ShardingError, match=r"has 6,000 letters; write axes") as said:
        MeshShape.parse("\udce4" * 6000)

    assert len(str(said.value)) < 1000
