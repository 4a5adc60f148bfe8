"""Sub-meshes: a part of the ranks, seen as a mesh of its own, without joining any anew."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.sharding import Mesh, MeshShape, ShardingError
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.mesh import DENSE_AXES, EXPERT_AXES, HYBRID_AXES
from trainwright.sharding.testing import mesh_shapes, orders

CUBE = MeshShape(pp=2, dp=2, tp=2)


class NoMoreSplits(RecordingCommunicator):
    """A world that refuses to be split once its mesh stands."""

    closed = False

    def split(self, color: int | None, key: int = 0) -> RecordingCommunicator | None:
        assert not self.closed
        return super().split(color, key)


def gathered(comm: Communicator, value: int) -> list[int]:
    found = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(found, torch.tensor([value])).wait()
    return found.tolist()


@settings(max_examples=10)
@given(st.data())
def test_a_submesh_has_the_ranks_that_differ_along_its_axes_and_joins_them_as_a_mesh_would(
    data: st.DataObject,
) -> None:
    shape = data.draw(mesh_shapes(max_world_size=8))
    shape = attrs.evolve(shape, order=data.draw(orders()))
    kept = data.draw(st.lists(st.sampled_from(DENSE_AXES), min_size=1, unique=True))

    def run(world: Communicator) -> None:
        closing = NoMoreSplits(world, [])
        mesh = Mesh(closing, shape)
        closing.closed = True
        part = mesh.submesh(*kept)

        assert gathered(part.world, mesh.rank) == list(mesh.ranks(*kept))
        assert part.rank == mesh.ranks(*kept).index(mesh.rank)
        for axis in DENSE_AXES:
            assert part.size(axis) == (mesh.size(axis) if axis in kept else 1)
            assert part.coordinate(axis) == (mesh.coordinate(axis) if axis in kept else 0)
        closing.closed = False
        again = Mesh(part.world, part.shape)  # joined anew, as a mesh of its own
        for axes in [*((axis,) for axis in (*DENSE_AXES, *EXPERT_AXES[1:])), kept, ("edp", "etp")]:
            comm = part.communicator(*axes)
            assert (comm.rank, comm.size) == (
                again.communicator(*axes).rank,
                again.communicator(*axes).size,
            )
            assert gathered(comm, part.rank) == list(part.ranks(*axes))
        if mesh.coordinate("pp") in (0, shape.pp - 1):
            ends = part.communicator("pp_ends")
            assert ends is mesh.communicator("pp_ends") if part.size("pp") > 1 else ends.size == 1

    LocalWorld(shape.world_size).run(run)


def test_a_whole_stage_keeps_its_expert_view_and_a_part_of_one_has_none() -> None:
    shape = MeshShape(pp=2, dp=2, tp=2, ep=4, etp=1)

    def run(world: Communicator) -> tuple[object, ...]:
        mesh = Mesh(world, shape)
        stage, layer = mesh.submesh("dp", "tp"), mesh.submesh("pp", "tp")
        return (
            stage.shape,
            stage.communicator("ep") is mesh.communicator("ep"),
            layer.shape,
            layer.communicator("etp") is mesh.communicator("tp"),
        )

    found = LocalWorld(8).run(run)

    assert found == [(attrs.evolve(shape, pp=1), True, MeshShape(pp=2, tp=2), True)] * 8


def test_replicas_of_experts_are_the_data_and_context_ranks_that_a_part_keeps() -> None:
    def run(world: Communicator) -> list[list[int]]:
        mesh = Mesh(world, MeshShape(dp=2, cp=2, tp=2))
        part = mesh.submesh("dp", "cp")
        return [gathered(part.communicator(axis), mesh.rank) for axis in ("edp", "etp")]

    found = LocalWorld(8).run(run)

    assert found == [[[rank % 2 + 2 * i for i in range(4)], [rank]] for rank in range(8)]


def test_the_parts_of_a_split_dp_can_be_kept_alone_or_together() -> None:
    shape = MeshShape(dp=4, dp_shard=2, tp=2)

    def run(world: Communicator) -> tuple[object, ...]:
        mesh = Mesh(world, shape)
        shards, replicas = mesh.submesh("dp_shard", "tp"), mesh.submesh("dp_replicate")
        both, whole = mesh.submesh("dp_shard", "dp_replicate"), mesh.submesh("dp", "tp")
        assert shards.communicator("dp_shard") is mesh.communicator("dp_shard")
        assert both.communicator("dp_replicate") is mesh.communicator("dp_replicate")
        assert all(shards.ranks(axis) == shards.ranks("dp") for axis in ("dp_shard", "edp"))
        found = (shards, replicas, both, whole)
        assert all(gathered(m.world, m.rank) == list(range(m.world.size)) for m in found)
        return tuple(m.shape for m in found)

    found = LocalWorld(8).run(run)

    shards, replicas = MeshShape(dp=2, tp=2), MeshShape(dp=2)
    assert found == [(shards, replicas, MeshShape(dp=4, dp_shard=2), shape)] * 8


def test_a_submesh_at_coordinates_is_for_the_ranks_there() -> None:
    def run(world: Communicator) -> list[tuple[int, ...] | None]:
        mesh = Mesh(world, CUBE)
        parts = [
            mesh.submesh_at(pp=1),
            mesh.submesh_at(pp=0, tp=1),
            mesh.submesh_at(dp_replicate=0, dp_shard=1),
            mesh.submesh_at(pp=0, dp=0, cp=0, tp=0),
        ]
        return [part and tuple(gathered(part.world, mesh.rank)) for part in parts]

    found = LocalWorld(8).run(run)

    late, column, half = (4, 5, 6, 7), (1, 3), (2, 3, 6, 7)
    assert [ranks[0] for ranks in found] == [None] * 4 + [late] * 4
    assert [ranks[1] for ranks in found] == [None, column, None, column] + [None] * 4
    assert [ranks[2] for ranks in found] == [None, None, half, half] * 2
    assert [ranks[3] for ranks in found] == [(0,)] + [None] * 7


def test_a_part_of_a_part_is_a_part() -> None:
    def run(world: Communicator) -> tuple[bool, ...]:
        mesh = Mesh(world, CUBE)
        stage = mesh.submesh("dp", "tp")
        layer = stage.submesh("tp")
        return (
            layer.world is mesh.communicator("tp"),
            stage.world is mesh.communicator("dp", "tp"),
            isinstance(layer.communicator("dp"), SingleCommunicator),
            mesh.submesh(*HYBRID_AXES).world is world,
        )

    assert LocalWorld(8).run(run) == [(True,) * 4] * 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda mesh: mesh.submesh(), "at least one axis to keep"),
        (lambda mesh: mesh.submesh("ep"), r"got ep; take communicator\('ep'\)"),
        (lambda mesh: mesh.submesh("dq"), "unknown axis 'dq'"),
        (lambda mesh: mesh.submesh("dp", "dp_shard"), "belong to two views"),
        (lambda mesh: mesh.submesh_at(tp=1), "coordinate tp=1 is outside 0..0"),
        (lambda mesh: mesh.submesh_at(tp=-1), "coordinate tp=-1 is outside 0..0"),
        (lambda mesh: mesh.submesh_at(etp=0), "got etp"),
    ],
)
def test_a_part_that_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make(Mesh(SingleCommunicator(), MeshShape()))
