"""Hybrid sharding, and weights that the first and the last pipeline stage share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import one_norm
from trainwright.sharding.data import DataParallel, ShardPolicy, by_class, data_parallel
from trainwright.sharding.data.testing import (
    Network,
    NetworkPlan,
    RecordedCall,
    RecordingCommunicator,
    SerialTrainer,
)
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.placement import ParameterPlacement, Partial

PLAN = NetworkPlan(hidden=5, depth=2, tied=True)


def make_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters or [nn.Parameter(torch.zeros(1))], lr=0.1, eps=1e-2)


def step(parallel: DataParallel, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    parallel.last_backward()
    loss.backward()
    parallel.reduce()
    parallel.wait()
    norm = float(one_norm(parallel.mesh, parallel.pieces.values()).norm)
    optimizer.step()
    parallel.publish()
    parallel.zero_grad()
    return norm


def loss_of(model: nn.Module, place: int, number: int) -> torch.Tensor:
    rows = torch.linspace(-1, 1 + place + number, 2 * PLAN.inputs, dtype=PLAN.dtype)
    loss: torch.Tensor = model(rows.view(2, -1)).square().sum()
    return loss


@settings(max_examples=8)
@given(
    shape=st.sampled_from(
        [
            MeshShape(dp=4, dp_shard=2),
            MeshShape(dp=3, dp_shard=1),
            MeshShape(dp=2, cp=2, dp_shard=1),
            MeshShape(dp=4, dp_shard=2, tp=2),
        ]
    ),
    stage=st.sampled_from([0, 1, 2, 3]),
    each=st.booleans(),
)
def test_hybrid_sharding_computes_what_one_process_computes(
    shape: MeshShape, stage: int, each: bool
) -> None:
    def run(world: Communicator) -> tuple[list[torch.Tensor], list[float]]:
        mesh = Mesh(world, shape)
        model = Network(PLAN, seed=world.rank)
        policy = ShardPolicy(
            stage=stage,
            units=by_class(nn.Linear),
            alignment=1,
            reduce_each_backward=each and stage >= 2,
        )
        parallel = data_parallel(model, mesh, policy)
        optimizer = make_adam([piece.parameter for piece in parallel.pieces.values()])
        place = mesh.communicator("dp", "cp").rank
        norms = [step(parallel, optimizer, loss_of(model, place, n)) for n in range(2)]
        parallel.await_weights()
        return [parameter.detach().clone() for parameter in model.parameters()], norms

    serial = SerialTrainer(Network(PLAN), make_adam)
    norms = []
    for number in range(2):
        places = range(shape.dp * shape.cp)
        gradients = serial.step(loss_of(serial.module, place, number) for place in places)
        norms.append(sum(float(g.square().sum()) for g in gradients.values()) ** 0.5)

    for weights, found in LocalWorld(shape.world_size).run(run):
        assert found == pytest.approx(norms, rel=1e-10)
        for mine, whole in zip(weights, serial.module.parameters(), strict=True):
            torch.testing.assert_close(mine, whole.detach(), rtol=0, atol=1e-12)


def test_hybrid_ranks_cut_over_shards_and_then_add_the_kept_ranges_of_replicas() -> None:
    def run(world: Communicator) -> tuple[list[tuple[str, int]], set[tuple[str, ...]], int]:
        calls: list[RecordedCall] = []
        mesh = Mesh(RecordingCommunicator(world, calls), MeshShape(dp=4, dp_shard=2))
        model = nn.Linear(8, 1, bias=False)
        policy = ShardPolicy(stage=2, alignment=1)
        parallel = data_parallel(model, mesh, policy)
        calls.clear()
        model(torch.ones(1, 8)).sum().backward()
        parallel.reduce()
        parallel.wait()
        replicated = {piece.spec.replicated for piece in parallel.pieces.values()}
        return [(c.operation, c.numel) for c in calls], replicated, parallel.layout[0].num_ranks

    expected = ([("reduce_scatter", 8), ("all_reduce", 4)], {("dp_replicate",)}, 2)
    assert LocalWorld(4).run(run) == [expected] * 4


class Ends(nn.Module):
    """What a pipeline's stage holds of a model whose head is its embedding."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__()
        whole = torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3)
        self.own = nn.Parameter(torch.full((4,), stage + 1.0, dtype=torch.float64))
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        if self.is_first:
            self.embedding = nn.Parameter(whole.clone())
        if self.is_last:
            # Other weights than the first stage's: those count.
            self.head = nn.Parameter(whole * 2 if num_stages > 1 else whole)

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        tied = ParameterPlacement.replicated((7, 3), {"pp": Partial()})
        return {name: tied for name in ("embedding", "head") if hasattr(self, name)}

    def loss(self, place: int) -> torch.Tensor:
        total = (self.own * (place + 1)).square().sum()
        if self.is_first:
            total = total + (self.embedding * (place + 2)).square().sum()
        if self.is_last:
            total = total + (self.head.sin() * (place + 3)).sum()
        return total


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["pp=2", "pp=2,dp=2", "pp=3,dp=2", "pp=2,dp=4,dp_shard=2"])
def test_a_weight_of_both_pipeline_ends_has_one_sum_one_norm_and_one_value(
    stage: int, layout: str
) -> None:
    shape = MeshShape.parse(layout)

    def run(world: Communicator) -> tuple[torch.Tensor | None, list[str], float]:
        mesh = Mesh(world, shape)
        model = Ends(mesh.coordinate("pp"), shape.pp)
        policy = ShardPolicy(stage=stage, alignment=1)
        parallel = data_parallel(model, mesh, policy, hooks=False)
        optimizer = make_adam([piece.parameter for piece in parallel.pieces.values()])
        for _ in range(2):
            parallel.await_weights()
            norm = step(parallel, optimizer, model.loss(mesh.coordinate("dp")))
        parallel.await_weights()
        tied = [p.detach() for name, p in model.named_parameters() if name != "own"]
        return (tied[0] if tied else None), list(parallel.units), norm

    # One process: the one weight is used at both ends, on every data rank.
    weight = nn.Parameter(torch.linspace(-1, 1, 21, dtype=torch.float64).view(7, 3))
    own = [nn.Parameter(torch.full((4,), s + 1.0, dtype=torch.float64)) for s in range(shape.pp)]
    optimizer = make_adam([weight, *own])
    for _ in range(2):
        optimizer.zero_grad()
        for place in range(shape.dp):
            (weight * (place + 2)).square().sum().backward()
            (weight.sin() * (place + 3)).sum().backward()
            sum((o * (place + 1)).square().sum() for o in own).backward()
        norm = sum(float(p.grad.square().sum()) for p in [weight, *own]) ** 0.5
        optimizer.step()

    for rank, (tied, units, found) in enumerate(LocalWorld(shape.world_size).run(run)):
        at = shape.coordinates(rank)["pp"]
        assert found == pytest.approx(norm, rel=1e-12)
        if at in (0, shape.pp - 1):
            assert ("head" if at else "embedding") in units
            torch.testing.assert_close(tied, weight.detach(), rtol=0, atol=1e-12)
        else:
            assert tied is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("first", "last"), [([3.0], [4.0]), ([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0])]
)
def test_the_uses_of_a_tied_weight_are_added_wherever_its_parts_lie(
    stage: int, first: list[float], last: list[float]
) -> None:
    size = len(first)

    def run(world: Communicator) -> tuple[float, ...]:
        mesh = Mesh(world, MeshShape(dp=2, pp=2))
        at_end = mesh.coordinate("pp") == 1
        model = nn.Module()
        # On the last stage something else stands before it, so that the ranks' parts differ.
        model.own = nn.Parameter(torch.zeros(1 if at_end else 4, dtype=torch.float64))
        model.tied = nn.Parameter(torch.ones(size, dtype=torch.float64))
        tied = ParameterPlacement.replicated((size,), {"pp": Partial()})
        policy = ShardPolicy(stage=stage, alignment=1)
        parallel = data_parallel(model, mesh, policy, {"tied": tied}, hooks=False)
        optimizer = torch.optim.SGD(
            [piece.parameter for piece in parallel.pieces.values()] or [nn.Parameter()], lr=0.1
        )
        # The data ranks see a quarter and three quarters of it.
        share = 0.75 if mesh.coordinate("dp") else 0.25
        use = torch.tensor(last if at_end else first, dtype=torch.float64) * share
        for _ in range(3):
            parallel.await_weights()
            step(parallel, optimizer, (model.tied * use).sum() + 0 * model.own.sum())
        parallel.await_weights()
        return tuple(model.tied.tolist())

    held = LocalWorld(4).run(run)

    assert len(set(held)) == 1
    sums = [a + b for a, b in zip(first, last, strict=True)]
    assert held[0] == pytest.approx([1 - 0.3 * total for total in sums], rel=1e-14)


def test_a_stage_between_the_ends_cannot_hold_a_weight_tied_over_them() -> None:
    def run(world: Communicator) -> None:
        mesh = Mesh(world, MeshShape(pp=3))
        placement = ParameterPlacement.replicated((1, 1), {"pp": Partial()})
        if mesh.coordinate("pp") == 1:
            with pytest.raises(ShardingError, match=r"weight is tied over .* stage 1 of 3; only"):
                data_parallel(
                    nn.Linear(1, 1, bias=False), mesh, ShardPolicy(), {"weight": placement}
                )

    LocalWorld(3).run(run)
