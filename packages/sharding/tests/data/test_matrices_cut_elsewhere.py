"""Whole matrices that tensor and expert parallelism cut too are updated as in one process."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Box, Communicator, LocalWorld
from trainwright.sharding import Mesh, MeshShape, ShardingError
from trainwright.sharding.data import (
    DataParallel,
    ShardPolicy,
    WholeMatrices,
    check_optimizer,
    data_parallel,
)
from trainwright.sharding.placement import ParameterPlacement, Shard
from trainwright.sharding.tensor import Cut

SHAPES = {"rows": (5, 4), "columns": (3, 6), "both_ends": (7, 2), "few": (1, 4), "whole": (4, 3)}
EXPERTS = (4, 24, 3)


def value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Whole numbers: their sums over ranks are exact in any order."""
    generator = torch.Generator().manual_seed(seed * 100 + len(name))
    return torch.randint(-4, 5, shape, generator=generator).double()


class Normalised(torch.optim.Optimizer):
    """Moves along the gradients so far, divided by the norm of all of them and of the weight."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["sum"] = state.get("sum", 0.0) + parameter.grad
            parameter -= state["sum"] / (state["sum"].norm() + parameter.norm() + 1)


class Cuts(nn.Module):
    """This rank's parts of matrices that are cut in different ways."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        tp, rank = mesh.size("tp"), mesh.coordinate("tp")
        self.places = {
            "rows": ParameterPlacement.cut(SHAPES["rows"], 0, Cut.uneven(5, tp), rank=rank),
            "columns": ParameterPlacement.cut(SHAPES["columns"], 1, Cut.uneven(6, tp), rank=rank),
            "both_ends": ParameterPlacement.cut(
                SHAPES["both_ends"], 0, Cut.uneven(7, tp), rank=rank
            ),
            "few": ParameterPlacement.cut(SHAPES["few"], 0, Cut.uneven(1, tp), rank=rank),
            "whole": ParameterPlacement.replicated(SHAPES["whole"]),
            "experts": self._experts(mesh),
        }
        for name, place in self.places.items():
            part = self.part(name, value(name, place.global_shape, 0))
            self.register_parameter(name, nn.Parameter(part))

    @staticmethod
    def _experts(mesh: Mesh) -> ParameterPlacement:
        num, rows, width = EXPERTS
        local, part = num // mesh.size("ep"), rows // mesh.size("etp") // 2
        first, begin = mesh.coordinate("ep") * local, mesh.coordinate("etp") * part
        boxes = [
            Box((expert, at + begin, 0), (expert + 1, at + begin + part, width))
            for expert in range(first, first + local)
            for at in (0, rows // 2)
        ]
        return ParameterPlacement(EXPERTS, tuple(boxes), {"ep": Shard(0), "etp": Shard(1)})

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        parts = [whole[box.slices].reshape(-1) for box in self.places[name].boxes]
        boxes = self.places[name].boxes
        flat = torch.cat(parts) if parts else whole.new_empty(0)
        if name == "experts":
            return flat.view(len(boxes) // 2, -1, EXPERTS[2])
        if name == "columns":
            return flat.view(whole.shape[0], sum(box.shape[1] for box in boxes))
        return flat.view(sum(box.shape[0] for box in boxes), *whole.shape[1:])

    def parameter_placements(self) -> dict[str, ParameterPlacement]:
        return self.places

    def forward(self, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((self.get_parameter(n) * w).sum() for n, w in weights.items())  # type: ignore[return-value]


def serial(steps: int, factory: Any, *, stacked: bool) -> dict[str, torch.Tensor]:
    """Train the plain parameters, with the gradients of the one data rank that has any."""
    shapes = {**SHAPES, "experts": EXPERTS}
    plain = {name: value(name, shape, 0) for name, shape in shapes.items()}
    parts: dict[str, list[nn.Parameter]] = {}
    for name, weight in plain.items():
        slices = list(weight) if stacked and weight.dim() > 2 else [weight]
        parts[name] = [nn.Parameter(each) for each in slices]
    optimizers = [factory([each]) for each_of in parts.values() for each in each_of]
    for step in range(steps):
        for name, shape in shapes.items():
            gradient = value(name, shape, step + 1)
            grads = list(gradient) if len(parts[name]) > 1 else [gradient]
            for parameter, grad in zip(parts[name], grads, strict=True):
                parameter.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return plain


@attrs.define
class Trained:
    """What a rank has after training."""

    specs: dict[str, Any]
    weights: dict[str, torch.Tensor]
    owned: dict[str, Any]


def train(comm: Communicator, layout: str, stage: int, factory: Any, stacked: bool) -> Trained:
    mesh = Mesh(comm, MeshShape.parse(layout))
    module = Cuts(mesh)
    parallel = data_parallel(module, mesh, ShardPolicy(stage=stage, alignment=1))
    matrices = WholeMatrices(parallel, lambda spec: True, factory, stacked=stacked, round_bytes=64)
    check_optimizer(parallel, matrices)
    for step in range(2):
        one_step(parallel, mesh, step)
        matrices.step()
        parallel.publish()
    pieces = parallel.pieces
    return Trained(
        {name: piece.spec for name, piece in pieces.items()},
        {name: piece.parameter.detach().clone() for name, piece in pieces.items()},
        matrices.owned,
    )


def one_step(parallel: DataParallel, mesh: Mesh, step: int) -> None:
    module = parallel.module
    assert isinstance(module, Cuts)
    parallel.zero_grad()
    grads = {}
    for name, place in module.places.items():
        whole = value(name, place.global_shape, step + 1)
        has_any = mesh.coordinate("edp" if name == "experts" else "dp") == 0
        grads[name] = module.part(name, whole if has_any else whole * 0)
    module(grads).backward()
    parallel.reduce()
    parallel.wait()


def assert_same(found: list[Trained], expected: dict[str, torch.Tensor]) -> None:
    whole = {name: torch.full_like(weight, torch.nan) for name, weight in expected.items()}
    for rank in found:
        for name, spec in rank.specs.items():
            spec.insert(rank.weights[name].view(-1), whole[name])
    for name, weight in expected.items():
        torch.testing.assert_close(whole[name], weight, rtol=1e-12, atol=1e-12)


LAYOUTS = ["tp=2", "dp=2,tp=3", "dp=2,tp=2,ep=2", "dp=2,tp=2,ep=4,etp=1"]


@pytest.mark.parametrize(
    ("layout", "stage", "stacked"),
    [
        pytest.param(layout, stage, stacked, marks=() if sampled else pytest.mark.long)
        for number, layout in enumerate(LAYOUTS)
        for stage in range(4)
        for stacked in (False, True)
        for sampled in [stage == number and stacked == (number > 1)]
    ],
)
def test_matrices_that_tensor_and_expert_ranks_have_parts_of_are_those_of_one_process(
    layout: str, stage: int, stacked: bool
) -> None:
    expected = serial(2, Normalised, stacked=stacked)
    size = MeshShape.parse(layout).world_size

    found = LocalWorld(size).run(train, layout, stage, Normalised, stacked)

    assert_same(found, expected)


@pytest.mark.parametrize("stage", [2])
def test_muon_is_given_each_matrix_of_a_stack(stage: int) -> None:
    muon = functools.partial(torch.optim.Muon, lr=0.25)
    expected = serial(2, muon, stacked=True)

    found = LocalWorld(4).run(train, "dp=2,tp=2,ep=2", stage, muon, True)

    assert_same(found, expected)
    owned = [label for rank in found for label in rank.owned]
    assert {label for label in owned if label.startswith("experts")} == {
        f"experts[{expert}]" for expert in range(EXPERTS[0])
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_each_matrix_counts_as_one_ranks_however_many_keep_it(stage: int) -> None:
    found = LocalWorld(4).run(train, "dp=2,tp=2", stage, Normalised, False)

    coordinates = [MeshShape(dp=2, tp=2).coordinates(rank) for rank in range(4)]
    writers = [
        label
        for rank, place in zip(found, coordinates, strict=True)
        for label, spec in rank.owned.items()
        if all(place[axis] == 0 for axis in spec.replicated)
    ]
    assert sorted(writers) == sorted([*SHAPES, "experts"])


@settings(max_examples=5)
@given(tp=st.integers(1, 4), dp=st.integers(1, 2), stage=st.integers(0, 3))
def test_ranks_that_keep_nothing_of_a_matrix_help_with_it(tp: int, dp: int, stage: int) -> None:
    # Of its single row one tensor rank at most has any, and of each row's parts few data ranks.
    found = LocalWorld(dp * tp).run(train, f"dp={dp},tp={tp}", stage, Normalised, False)

    assert_same(found, serial(2, Normalised, stacked=False))


def test_a_placement_that_hides_a_cut_is_refused_by_every_rank() -> None:
    def run(comm: Communicator) -> None:
        mesh = Mesh(comm, MeshShape(tp=2))
        model = nn.Linear(4, 2, bias=False)
        place = ParameterPlacement((4, 4), (Box((2 * comm.rank, 0), (2 * comm.rank + 2, 4)),))
        parallel = data_parallel(model, mesh, ShardPolicy(), {"weight": place})
        with pytest.raises(ShardingError, match=r"weight has 16 elements.*name them in its weight"):
            WholeMatrices(parallel, ["weight"], Normalised)

    LocalWorld(2).run(run)
