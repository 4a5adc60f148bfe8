"""Parameters placed on several axes: who sums their gradients, and in which order."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, ShardSpec, SingleCommunicator
from trainwright.sharding.data import ShardPolicy
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator, wrap_on
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.placement import ParameterPlacement, Partial

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def lone_mesh() -> Mesh:
    return Mesh(SingleCommunicator(), MeshShape())


class Heads(nn.Module):
    """Sharded heads behind a replicated norm, and a bias that every rank computes alike."""

    def __init__(self, tp: int, rank: int, out: int = 12, width: int = 3) -> None:
        super().__init__()
        whole = torch.arange(out * width, dtype=torch.float64).view(out, width).sin()
        spec = ParameterPlacement.sharded((out, width), 0, rank=rank, size=tp)
        self.weight = nn.Parameter(whole[spec.boxes[0].slices].clone())
        self.norm = nn.Parameter(torch.linspace(-1, 1, width, dtype=torch.float64))
        self.bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self._placements = {
            "weight": spec,
            "norm": ParameterPlacement.replicated((width,), {"tp": Partial()}),
        }

    def parameter_placements(self) -> Mapping[str, ParameterPlacement]:
        return self._placements

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        # Over the tensor ranks these losses sum to the whole model's, without the bias term.
        heads = (rows * self.norm) @ self.weight.t()
        return heads.square().sum() + (self.bias * rows.sum()).square().sum()


def rows_of(place: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + place, 6, dtype=torch.float64).view(2, 3)


@attrs.frozen
class Found:
    specs: list[ShardSpec]
    gradients: list[torch.Tensor]
    coordinates: dict[str, int]


def run_heads(comm: Communicator, shape: MeshShape, policy: ShardPolicy) -> Found:
    mesh = Mesh(comm, shape)
    model = Heads(shape.tp, mesh.coordinate("tp"))
    parallel = wrap_on(mesh, model, policy)
    parallel.last_backward()
    model(rows_of(mesh.communicator("dp", "cp").rank)).backward()
    parallel.reduce()
    parallel.wait()
    pieces = parallel.pieces.values()
    return Found(
        [piece.spec for piece in pieces],
        [piece.parameter.grad.clone() for piece in pieces],
        mesh.coordinates,
    )


@given(
    shape=st.builds(
        MeshShape, dp=st.integers(1, 3), cp=st.integers(1, 2), tp=st.sampled_from([1, 2, 3])
    ).filter(lambda shape: shape.world_size <= 8),
    policy=st.builds(
        ShardPolicy,
        stage=st.sampled_from([0, 1, 2, 3]),
        bucket_bytes=st.sampled_from([1, 10**6]),
        alignment=st.sampled_from([1, 2]),
    ),
)
def test_placed_parameters_get_the_whole_models_gradients_each_element_owned_once(
    shape: MeshShape, policy: ShardPolicy
) -> None:
    serial = Heads(1, 0)
    for place in range(shape.dp * shape.cp):
        serial(rows_of(place)).backward()

    results = LocalWorld(shape.world_size).run(run_heads, shape, policy)

    for name, parameter in serial.named_parameters():
        owners = torch.zeros(parameter.shape)
        for found in results:
            for spec, gradient in zip(found.specs, found.gradients, strict=True):
                if spec.name != name:
                    continue
                torch.testing.assert_close(
                    gradient.flatten(), spec.extract(parameter.grad).flatten(), rtol=1e-12, atol=0
                )
                if all(found.coordinates[axis] == 0 for axis in spec.replicated):
                    spec.insert(torch.ones(spec.numel), mask := torch.zeros(parameter.shape))
                    owners += mask
        assert torch.equal(owners, torch.ones(parameter.shape)), name


def test_buckets_are_cut_over_data_and_context_ranks_together() -> None:
    def run(comm: Communicator) -> tuple[list[tuple[str, int]], list[int], int]:
        calls: list[RecordedCall] = []
        mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape(dp=2, cp=2, tp=2))
        model = nn.Linear(8, 1, bias=False)
        parallel = wrap_on(mesh, model, ShardPolicy(stage=1, alignment=1))
        calls.clear()
        model(torch.ones(1, 8)).sum().backward()
        parallel.reduce()
        parallel.wait()
        specs = [piece.spec for piece in parallel.pieces.values()]
        assert [spec.replicated for spec in specs] == [("tp",)]
        found = [(call.operation, call.numel) for call in calls]
        return found, [spec.numel for spec in specs], parallel.layout[0].num_ranks

    assert LocalWorld(8).run(run) == [([("reduce_scatter", 8)], [2], 4)] * 8


@STAGES
def test_gradients_of_experts_are_summed_over_the_ranks_that_hold_them(stage: int) -> None:
    def run(comm: Communicator) -> float:
        mesh = Mesh(comm, MeshShape(dp=4, ep=2))
        model = nn.Linear(1, 1, bias=False)
        expert = mesh.coordinate("ep")
        placement = ParameterPlacement.sharded((2, 1), 0, rank=expert, size=2, axis="ep")
        parallel = wrap_on(mesh, model, ShardPolicy(stage=stage), {"weight": placement})
        # Both ranks that hold an expert have already seen the tokens of all that do not.
        (model.weight * 10**expert * (1 + mesh.coordinate("edp"))).backward()
        parallel.reduce()
        parallel.wait()
        return sum(piece.parameter.grad.item() for piece in parallel.pieces.values())

    copies = 1 if stage else 2
    assert sum(LocalWorld(4).run(run)) == copies * (3.0 + 30.0)


def test_float64_weights_computed_with_in_sixteen_bits_keep_float64_masters() -> None:
    policy = ShardPolicy(parameter_dtype=lambda *_: torch.bfloat16)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1 + 2.0**-40)

    parallel = wrap_on(lone_mesh(), model, policy)

    assert parallel.pieces["weight"].parameter.item() == 1 + 2.0**-40
    assert model.weight.dtype == torch.bfloat16


@STAGES
def test_partial_sums_of_tensor_ranks_are_added_last_and_on_the_kept_range_only(
    stage: int,
) -> None:
    def run(comm: Communicator) -> list[tuple[str, int]]:
        calls: list[RecordedCall] = []
        mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape(dp=2, tp=2))
        model = nn.Module()
        model.norm = nn.Parameter(torch.ones(8))
        placement = ParameterPlacement.replicated((8,), {"tp": Partial()})
        policy = ShardPolicy(stage=stage, alignment=1)
        parallel = wrap_on(mesh, model, policy, {"norm": placement})
        calls.clear()
        (model.norm.sum() * 2**comm.rank).backward()
        parallel.reduce()
        parallel.wait()
        assert {v for p in parallel.pieces.values() for v in p.parameter.grad.tolist()} == {15.0}
        return [(call.operation, call.numel) for call in calls]

    first = ("reduce_scatter", 8) if stage else ("all_reduce", 8)
    assert LocalWorld(4).run(run) == [[first, ("all_reduce", 4 if stage else 8)]] * 4


@STAGES
def test_sums_over_two_further_axes_are_taken_one_after_the_other(stage: int) -> None:
    def run(comm: Communicator) -> list[float]:
        mesh = Mesh(comm, MeshShape(dp=4, tp=2, ep=2))
        model = nn.Linear(1, 2, bias=False)
        placement = ParameterPlacement.replicated((2, 1), {"ep": Partial(), "etp": Partial()})
        policy = ShardPolicy(stage=stage, alignment=1)
        parallel = wrap_on(mesh, model, policy, {"weight": placement})
        (model.weight.sum() * 2**comm.rank).backward()
        parallel.reduce()
        parallel.wait()
        return [p.parameter.grad.flatten()[0].item() for p in parallel.pieces.values()]

    assert LocalWorld(8).run(run) == [[255.0]] * 8


@STAGES
def test_replicated_key_value_weights_and_biases_are_summed_over_tensor_ranks(stage: int) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = nn.Linear(1, 1)
        placements = {
            name: ParameterPlacement.replicated(p.shape, {"tp": Partial()})
            for name, p in model.named_parameters()
        }
        mesh = Mesh(comm, MeshShape(tp=2))
        parallel = wrap_on(mesh, model, ShardPolicy(stage=stage), placements)
        (model.weight * [1.0, 2.0][comm.rank] + model.bias * [0.5, 0.25][comm.rank]).backward()
        parallel.reduce()
        parallel.wait()
        return {name: p.parameter.grad.item() for name, p in parallel.pieces.items()}

    assert LocalWorld(2).run(run) == [{"weight": 3.0, "bias": 0.75}] * 2
