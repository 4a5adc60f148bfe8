"""Device meshes of torch.distributed: what needs no processes. The rest: tests of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import Mesh, MeshShape, ShardingError
from trainwright.sharding.mesh import DENSE_AXES
from trainwright.sharding.mesh.devices import plain_order
from trainwright.sharding.testing import orders


@given(orders())
def test_the_order_of_plain_ranks_is_read_from_where_they_lie(order: tuple[str, ...]) -> None:
    shape = MeshShape(pp=2, dp=3, cp=1, tp=2, order=order)
    ranks = torch.tensor(shape.ranks(0, *DENSE_AXES)).view(2, 3, 1, 2)

    assert plain_order(ranks, DENSE_AXES) == tuple(axis for axis in order if axis != "cp")
    assert plain_order(ranks * 5 + 7, DENSE_AXES) == plain_order(ranks, DENSE_AXES)


def test_ranks_that_no_order_puts_there_have_none() -> None:
    assert plain_order(torch.tensor([[0, 3], [1, 2]]), ("dp", "tp")) is None
    assert plain_order(torch.tensor([1, 0]), ("dp",)) is None
    assert plain_order(torch.tensor([[4]]), ("dp", "tp")) == ()


def test_threads_have_no_device_mesh() -> None:
    def run(world: Communicator) -> None:
        with pytest.raises(ShardingError, match=r"needs torch's default process group"):
            Mesh(world, MeshShape(dp=2)).to_device_mesh()

    LocalWorld(2).run(run)
