"""The debug check of replicas: it names the first tensor that differs, on every rank."""

import pytest
import torch
from torch import nn

from trainwright.collectives import LocalWorld, random
from trainwright.sharding import (
    ColumnParallelLinear,
    Mesh,
    MeshShape,
    ReplicaMismatchError,
    check_replicated,
    check_replicated_parameters,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def on_ranks(size, check):
    def run(world):
        return check(Mesh(world, MeshShape(dp=size)), world.rank)

    return LocalWorld(size).run(run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_replicas_pass_and_one_changed_element_is_named(dtype):
    def check(mesh, rank):
        tensors = {name: torch.ones(3, 4).to(dtype) for name in ("a", "b", "c")}
        check_replicated(mesh, tensors, ["dp"])
        if rank == 2:
            tensors["b"][1, 2] = 0
            tensors["c"][0, 0] = 0
        with pytest.raises(ReplicaMismatchError, match=r"^b is .* on dp, .*ranks 0, 1; ranks 2\."):
            check_replicated(mesh, tensors, ["dp"])

    on_ranks(3, check)


def test_the_smallest_change_and_an_exchange_of_two_elements_are_seen():
    def check(mesh, rank):
        values = torch.arange(1.0, 7.0)
        last_bit = values.clone()
        last_bit[3] = torch.nextafter(values[3], torch.tensor(99.0))
        for other in (last_bit, values.flip(0), -values):
            with pytest.raises(ReplicaMismatchError):
                check_replicated(mesh, {"w": other if rank else values}, ["dp"])

    on_ranks(2, check)


def test_shards_may_differ_and_replicas_along_other_axes_may_not():
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        model = nn.ModuleDict(
            {"mix": ColumnParallelLinear(4, 4, mesh.communicator("tp")), "norm": nn.LayerNorm(4)}
        )
        model["mix"].reset_parameters(random.Key(0, "mix.weight"), 1.0)
        check_replicated_parameters(model, mesh)
        if mesh.coordinate("tp") == 1:
            nn.init.zeros_(model["norm"].weight)
        with pytest.raises(ReplicaMismatchError, match=r"norm\.weight .*ranks 0, 2; ranks 1, 3"):
            check_replicated_parameters(model, mesh)

    LocalWorld(4).run(run)


def test_nothing_is_compared_where_there_is_one_rank_or_no_tensor():
    def check(mesh, rank):
        check_replicated(mesh, {"w": torch.full((2,), float(rank))}, ["tp"])
        check_replicated(mesh, {"w": torch.full((2,), float(rank))}, [])
        check_replicated(mesh, {}, ["dp"])
        check_replicated(mesh, {"empty": torch.zeros(0)}, ["dp"])

    on_ranks(2, check)
