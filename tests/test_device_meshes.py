"""Device meshes of torch.distributed: over real processes and Gloo, in both directions."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.collectives.testing import run_processes
from trainwright.sharding import Mesh, MeshShape, ShardingError


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except ShardingError as error:
        return str(error)
    return "nothing"


def gathered(comm: Communicator, value: int) -> list[int]:
    found = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(found, torch.tensor([value])).wait()
    return found.tolist()


def check_both_ways(world: Communicator) -> None:
    for shape in (
        MeshShape(dp=2, tp=2),
        MeshShape(pp=2, dp=2, order="dp/pp/cp/tp"),
        MeshShape(dp=4, dp_shard=2),
        MeshShape(dp=4, dp_shard=2, order="dp_shard/dp_replicate/pp/cp/tp"),
        MeshShape(cp=4, ep=2),
    ):
        mesh = Mesh(world, shape)
        device_mesh = mesh.to_device_mesh()
        for axis in device_mesh.mesh_dim_names:
            assert device_mesh[axis].get_local_rank() == mesh.coordinate(axis)
            assert device_mesh[axis].mesh.tolist() == list(mesh.ranks(axis))
        back = Mesh.from_device_mesh(device_mesh, ep=shape.ep)
        assert attrs.evolve(back.shape, order=shape.order) == shape
        assert (back.rank, back.coordinates) == (mesh.rank, mesh.coordinates)


def check_given_names(world: Communicator) -> None:
    mesh = Mesh(world, MeshShape(dp=2, tp=2))
    turned = mesh.to_device_mesh("tp", "cp", "dp")
    assert turned.mesh.tolist() == [[[0, 2]], [[1, 3]]]
    assert Mesh.from_device_mesh(turned, world=world).coordinates == mesh.coordinates
    assert mesh.to_device_mesh("edp", "etp").mesh.tolist() == [[0, 1], [2, 3]]
    plain = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    named = Mesh.from_device_mesh(plain, ("dp", "tp"))
    assert gathered(named.communicator("tp"), world.rank) == list(mesh.ranks("tp"))
    assert "dim 0 of the device mesh: unknown axis 'data'" in said(
        lambda: Mesh.from_device_mesh(plain)
    )
    assert "name an axis twice" in said(lambda: Mesh.from_device_mesh(plain, ("dp", "dp_shard")))
    assert "it names 1" in said(lambda: Mesh.from_device_mesh(plain, ("dp",)))
    assert "has no names" in said(lambda: Mesh.from_device_mesh(init_device_mesh("cpu", (2, 2))))
    assert "name all of dp, tp" in said(lambda: mesh.to_device_mesh("dp"))
    assert "slice it" in said(lambda: mesh.submesh("tp").to_device_mesh())
    alone = SingleCommunicator()
    assert "0 of 1 in world" in said(lambda: Mesh.from_device_mesh(turned, world=alone))


def check_unusual_places(world: Communicator) -> None:
    crossed = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "tp"))
    mesh = Mesh.from_device_mesh(crossed)
    where = {0: (0, 0), 3: (0, 1), 1: (1, 0), 2: (1, 1)}[world.rank]
    assert (mesh.coordinate("dp"), mesh.coordinate("tp")) == where
    peers = {0: [0, 3], 1: [1, 2]}[where[0]]
    assert gathered(mesh.communicator("tp"), world.rank) == peers
    sliced = mesh.to_device_mesh()
    assert sliced.mesh.tolist() == [[0, 3], [1, 2]]

    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = Mesh.from_device_mesh(whole["tp"])
    assert stage.shape == MeshShape(tp=2)
    assert gathered(stage.world, world.rank) == peers_along(world.rank)

    some = DeviceMesh("cpu", [1, 3], mesh_dim_names=("dp",))
    if world.rank in (1, 3):
        assert gathered(Mesh.from_device_mesh(some).world, world.rank) == [1, 3]
    else:
        assert "is not in the device mesh of ranks 1, 3" in said(
            lambda: Mesh.from_device_mesh(some)
        )


def peers_along(rank: int) -> list[int]:
    return [rank - rank % 2, rank - rank % 2 + 1]


def check_everything(world: Communicator) -> None:
    check_both_ways(world)
    check_given_names(world)
    check_unusual_places(world)


@pytest.mark.processes
def test_a_mesh_and_a_device_mesh_put_every_process_at_the_same_place() -> None:
    run_processes(check_everything, 4)
