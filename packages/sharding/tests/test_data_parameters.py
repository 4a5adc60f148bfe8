"""Which parameters are trained, which are one, where they lie and who sums them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.sharding.data import Piece, ShardPolicy, data_parallel
from trainwright.sharding.data.testing import wrap_on
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.placement import ParameterPlacement, Partial

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def lone_mesh() -> Mesh:
    return Mesh(SingleCommunicator(), MeshShape())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


@STAGES
def test_a_tied_weight_stays_one_with_one_summed_gradient_and_one_state(stage: int) -> None:
    def make() -> Tied:
        model = Tied()
        with torch.no_grad():
            model.head.weight.copy_(torch.arange(8.0).view(4, 2) / 8)
        return model

    def run(comm: Communicator) -> tuple[list[str], torch.Tensor, int]:
        model = make()
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        parallel = wrap_on(mesh, model, ShardPolicy(stage=stage, alignment=1))
        optimizer = torch.optim.Adam([p.parameter for p in parallel.pieces.values()], eps=1e-3)
        for _ in range(2):
            parallel.zero_grad()
            parallel.last_backward()
            model(torch.tensor([comm.rank, 3])).square().sum().backward()
            parallel.reduce()
            parallel.wait()
            optimizer.step()
            parallel.publish()
            parallel.await_weights()
        assert model.head.weight is model.embedding.weight
        return list(parallel.pieces), model.head.weight.detach(), len(optimizer.state)

    serial = make()
    optimizer = torch.optim.Adam(serial.parameters(), eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            serial(torch.tensor([rank, 3])).square().sum().backward()
        optimizer.step()

    for names, weight, num_states in LocalWorld(2).run(run):
        assert names == ["embedding.weight"]
        assert num_states == 1
        torch.testing.assert_close(weight, serial.head.weight.detach())


def test_two_parameters_in_one_memory_are_refused_before_they_come_apart() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    model["two"].weight = nn.Parameter(model["one"].weight.data)

    with pytest.raises(ShardingError, match=r"one.weight and two.weight are two parameters in the"):
        data_parallel(model, lone_mesh())


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_frozen_parameters_are_left_alone_but_start_equal_and_are_listed(stage: int) -> None:
    def run(comm: Communicator) -> tuple[list[str], list[str], list[int], torch.dtype]:
        model = nn.Module()
        model.table = nn.Parameter(
            torch.full((3,), comm.rank + 5, dtype=torch.int8), requires_grad=False
        )
        model.base = nn.Parameter(torch.ones(3, 2).t(), requires_grad=False)
        model.trained = nn.Parameter(torch.ones(2))
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=stage, parameter_dtype=lambda *_: torch.bfloat16)
        parallel = data_parallel(model, mesh, policy)
        assert parallel.frozen["base"].parameter is model.base
        assert parallel.frozen["base"].spec.whole
        return list(parallel.pieces), list(parallel.frozen), model.table.tolist(), model.base.dtype

    results = LocalWorld(2).run(run)

    assert [result[1:] for result in results] == [
        (["table", "base"], [5, 5, 5], torch.bfloat16)
    ] * 2
    assert {name for result in results for name in result[0]} == {"trained"}


@STAGES
def test_pieces_come_in_the_order_of_registration(stage: int) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))

    parallel = wrap_on(lone_mesh(), model, ShardPolicy(stage=stage, bucket_bytes=8))

    assert list(parallel.pieces) == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("broadcast", [True, False])
def test_weights_start_as_the_first_ranks_unless_told_otherwise(broadcast: bool) -> None:
    def run(comm: Communicator) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, comm.rank + 1)
        mesh = Mesh(comm, MeshShape(dp=2, cp=2))
        data_parallel(model, mesh, ShardPolicy(broadcast_weights=broadcast))
        return model.weight.item()

    assert LocalWorld(4).run(run) == ([1.0] * 4 if broadcast else [1.0, 2.0, 3.0, 4.0])


@STAGES
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_parameter_smaller_than_the_world_is_kept_by_some_ranks_only(
    stage: int, num_ranks: int
) -> None:
    def run(comm: Communicator) -> int:
        model = nn.Linear(1, 1, bias=False)
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        parallel = wrap_on(mesh, model, ShardPolicy(stage=stage))
        model(torch.ones(1, 1)).backward()
        parallel.reduce()
        parallel.wait()
        return sum(piece.parameter.grad.item() == comm.size for piece in parallel.pieces.values())

    assert sum(LocalWorld(num_ranks).run(run)) == (1 if stage else num_ranks)


def test_masters_of_a_stage_one_rank_take_the_memory_of_its_range_only() -> None:
    def run(comm: Communicator) -> list[int]:
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=1, alignment=1)
        parallel = data_parallel(nn.Linear(8, 8, dtype=torch.bfloat16), mesh, policy)
        held = (piece.parameter for piece in parallel.pieces.values())
        return sorted({parameter.untyped_storage().nbytes() for parameter in held})

    assert LocalWorld(4).run(run) == [[(64 + 8) // 4 * 4]] * 4


@STAGES
def test_a_model_with_nothing_to_train_goes_through_a_step(stage: int) -> None:
    def run(comm: Communicator) -> dict[str, Piece]:
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        parallel = wrap_on(mesh, nn.ReLU(), ShardPolicy(stage=stage))
        parallel.zero_grad()
        parallel.last_backward()
        parallel.reduce()
        parallel.wait()
        parallel.publish()
        parallel.load_masters()
        return parallel.pieces

    assert LocalWorld(2).run(run) == [{}, {}]


# Models that cannot be made data-parallel.


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def meta() -> nn.Module:
    return nn.Linear(1, 1, device="meta")


def with_gradient() -> nn.Module:
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).backward()
    return model


def complex_weights() -> nn.Module:
    return nn.Linear(1, 1, dtype=torch.complex64)


def already_wrapped() -> nn.Module:
    model = nn.Linear(1, 1)
    data_parallel(model, lone_mesh())
    return nn.Sequential(model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lazy, "weight has no shape yet; run one forward"),
        (meta, "weight is on the meta device"),
        (with_gradient, "weight already has a gradient.*zero_grad"),
        (complex_weights, "weight is torch.complex64; trainable parameters are one of"),
        (already_wrapped, "0.weight already belongs to a DataParallel"),
    ],
)
def test_a_parameter_that_cannot_be_trained_is_named(
    make: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        data_parallel(make(), lone_mesh())


def test_an_unknown_name_in_placements_is_told_with_the_nearest() -> None:
    placement = ParameterPlacement.replicated((1, 1))

    with pytest.raises(
        ShardingError, match="'wieght', which the model does not have; did you mean"
    ):
        data_parallel(nn.Linear(1, 1), lone_mesh(), placements={"wieght": placement})


def test_a_placement_of_another_size_is_refused() -> None:
    placement = ParameterPlacement.replicated((2, 1))

    with pytest.raises(ShardingError, match="weight has 1 elements but its boxes hold 2"):
        data_parallel(nn.Linear(1, 1), lone_mesh(), placements={"weight": placement})


def test_a_tied_weight_placed_in_two_ways_is_refused() -> None:
    placements = {
        "embedding.weight": ParameterPlacement.replicated((4, 2)),
        "head.weight": ParameterPlacement.replicated((4, 2), {"tp": Partial()}),
    }

    with pytest.raises(ShardingError, match=r"embedding.weight and head.weight are one parameter"):
        data_parallel(Tied(), lone_mesh(), placements=placements)


def test_a_weight_dtype_that_nothing_computes_in_is_refused() -> None:
    policy = ShardPolicy(parameter_dtype=lambda *_: torch.int8)

    with pytest.raises(ShardingError, match=r"parameter_dtype gave torch.int8 for weight"):
        data_parallel(nn.Linear(1, 1), lone_mesh(), policy)
