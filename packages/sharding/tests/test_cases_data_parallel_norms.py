"""What went wrong in other systems: norms, overflow seen by one rank, clipping, late weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import Mesh, MeshShape, ParameterPlacement, Partial, StepTotals, one_norm
from trainwright.sharding.data import WholeMatrices, parameter_groups
from trainwright.sharding.data.state_dict import full_state_dict
from trainwright.sharding.data.testing_ways import WAYS, Driven, Way, assemble
from trainwright.sharding.data.units import by_class

EVERY_WAY = pytest.mark.parametrize("way", WAYS, ids=str)
ONCE_A_STEP = tuple(way for way in WAYS if not way.each)


class Weighted(nn.Module):
    """Parameters given by name; the gradient of each is what the forward weighs it with."""

    def __init__(self, sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype)))

    def forward(self, **gradients: Iterable[float]) -> torch.Tensor:
        total = torch.zeros(())
        for name, gradient in gradients.items():
            parameter = self.get_parameter(name)
            total = total + (parameter * torch.tensor(gradient, dtype=parameter.dtype)).sum()
        return total


def totals(driven: Driven, p: float = 2.0) -> StepTotals:
    return one_norm(driven.mesh, driven.parallel.pieces.values(), p=p)


def clip(driven: Driven, max_norm: float) -> float:
    """Scale all gradients so that their norm is at most ``max_norm``; return what it was."""
    norm = float(totals(driven).norm)
    for piece in driven.parallel.pieces.values():
        assert piece.parameter.grad is not None
        piece.parameter.grad.mul_(min(1.0, max_norm / norm))
    return norm


def on(shape: str, way: Way, model: Callable[[Mesh], nn.Module], comm: Communicator) -> Driven:
    mesh = Mesh(comm, MeshShape.parse(shape))
    return way.drive(model(mesh), mesh)


@EVERY_WAY
@pytest.mark.parametrize(
    ("p", "expected", "clipped"),
    [(2.0, 5.0, [0.6, 0.8]), (math.inf, 4.0, [0.75, 1.0]), (1.0, 7.0, [3 / 7, 4 / 7])],
)
def test_the_norm_is_over_all_stages_of_a_pipeline_and_one_factor_clips_all(
    p: float, expected: float, clipped: list[float], way: Way
) -> None:
    def model(mesh: Mesh) -> nn.Module:
        names = ["first", "second", "nothing"]
        module = Weighted({names[mesh.coordinate("pp")]: 1})
        if mesh.coordinate("pp") == 2:
            module.requires_grad_(False)
        return module

    def run(comm: Communicator) -> tuple[float, list[Any]]:
        driven = on("pp=3,dp=2", way, model, comm)
        stage = driven.mesh.coordinate("pp")
        gradients = [{"first": [1.5]}, {"second": [2.0]}]
        loss = partial(driven.parallel.module, **gradients[stage]) if stage < 2 else None
        driven.reduce([loss])
        norm = float(totals(driven, p).norm)
        for piece in driven.parallel.pieces.values():
            piece.parameter.grad.mul_(1.0 / norm)
        return norm, driven.gradients()

    ranks = LocalWorld(6).run(run)

    assert [norm for norm, _ in ranks] == pytest.approx([expected] * 6)
    found = assemble(parts for _, parts in ranks)
    assert [found["first"].item(), found["second"].item()] == pytest.approx(clipped)


@EVERY_WAY
def test_gradients_that_all_ranks_hold_do_not_grow_the_norm_with_the_world(way: Way) -> None:
    def run(comm: Communicator) -> float:
        driven = on("dp=4", way, lambda mesh: Weighted({"w": 2}), comm)
        driven.reduce([partial(driven.parallel.module, w=[0.75, 1.0])])
        return float(totals(driven).norm)

    assert LocalWorld(4).run(run) == [5.0] * 4


@EVERY_WAY
def test_over_tensor_ranks_replicated_weights_count_once_and_shards_all(way: Way) -> None:
    class Layer(Weighted):
        def __init__(self, rank: int) -> None:
            super().__init__({"replicated": 1, "sharded": 1})
            self.rank = rank

        def parameter_placements(self) -> dict[str, ParameterPlacement]:
            return {"sharded": ParameterPlacement.sharded((2,), 0, rank=self.rank, size=2)}

    def run(comm: Communicator) -> float:
        driven = on("dp=2,tp=2", way, lambda mesh: Layer(mesh.coordinate("tp")), comm)
        part = [2.0] if driven.mesh.coordinate("tp") == 0 else [0.0]
        driven.reduce([partial(driven.parallel.module, replicated=[1.5], sharded=part)])
        return float(totals(driven).norm)

    assert LocalWorld(4).run(run) == [5.0] * 4


@EVERY_WAY
def test_different_experts_all_count_and_their_tokens_are_summed_from_every_rank(way: Way) -> None:
    class Experts(Weighted):
        def __init__(self, rank: int) -> None:
            super().__init__({"router": 1, "expert": 1})
            self.rank = rank

        def parameter_placements(self) -> dict[str, ParameterPlacement]:
            place = ParameterPlacement.sharded((2,), 0, rank=self.rank, size=2, axis="ep")
            return {"expert": place}

    def run(comm: Communicator) -> tuple[float, list[Any]]:
        driven = on("dp=4,ep=2", way, lambda mesh: Experts(mesh.coordinate("ep")), comm)
        # The tokens of two ranks reach an expert, those of all four the router.
        tokens = [1.0, 2.0, 3.0, 4.0][comm.rank]
        driven.reduce([partial(driven.parallel.module, router=[1.0], expert=[tokens])])
        return float(totals(driven).norm), driven.gradients()

    ranks = LocalWorld(4).run(run)

    found = assemble(parts for _, parts in ranks)
    assert found["expert"].tolist() == [4.0, 6.0]
    assert found["router"].tolist() == [4.0]
    assert [norm for norm, _ in ranks] == pytest.approx([(16 + 36 + 16) ** 0.5] * 4)


@EVERY_WAY
def test_a_weight_tied_over_the_ends_of_a_pipeline_has_one_gradient_and_counts_once(
    way: Way,
) -> None:
    class End(Weighted):
        def parameter_placements(self) -> dict[str, ParameterPlacement]:
            return {"tied": ParameterPlacement.replicated((8,), {"pp": Partial()})}

    def run(comm: Communicator) -> tuple[float, list[Any], list[float]]:
        driven = on("pp=2,dp=2", way, lambda mesh: End({"tied": 8}), comm)
        share = [1.0, 4.0][driven.mesh.coordinate("pp")]
        driven.reduce([partial(driven.parallel.module, tied=[share] * 8)])
        optimizer = torch.optim.SGD(parameter_groups(driven.parallel, lambda spec: True), lr=0.5)
        norm = float(totals(driven).norm)
        optimizer.step()
        driven.parallel.publish()
        return norm, driven.gradients(), driven.weights()["tied"].tolist()

    ranks = LocalWorld(4).run(run)

    assert [norm for norm, _, _ in ranks] == pytest.approx([28.284271] * 4)
    assert assemble(parts for _, parts, _ in ranks)["tied"].tolist() == [10.0] * 8
    assert [weights for _, _, weights in ranks] == [[-4.0] * 8] * 4


@EVERY_WAY
@pytest.mark.parametrize(
    ("bad", "count", "dtype"),
    [
        ([math.nan] * 5, 5, torch.float32),
        ([0.0, 0.0, math.inf, 0.0, 0.0], 1, torch.bfloat16),
        ([0.0, 0.0, 0.0, 0.0, -math.inf], 1, torch.float32),
    ],
    ids=["a loss that is no number", "an element", "the last element"],
)
def test_a_bad_step_is_seen_alike_by_every_rank_and_leaves_nothing_behind(
    bad: list[float], count: int, dtype: torch.dtype, way: Way
) -> None:
    def run(comm: Communicator) -> tuple[list[float], list[float], list[Any]]:
        driven = on("dp=3", way, lambda mesh: Weighted({"a": 5, "b": 2}, dtype), comm)
        groups = parameter_groups(driven.parallel, lambda spec: True)
        optimizer = torch.optim.Adam(groups, lr=0.5)
        seen: list[float] = []
        for step in range(3):
            is_bad = step == 1 and comm.rank == 0
            gradient = bad if is_bad else [1.0] * 5
            driven.reduce([partial(driven.parallel.module, a=gradient, b=[1.0, 1.0])])
            seen.append(float(totals(driven).non_finite))
            if seen[-1] == 0:
                optimizer.step()
            driven.parallel.publish()
        steps = [float(state["step"]) for state in optimizer.state.values()]
        assert all(step == 2 for step in steps)
        return seen, driven.weights()["a"].tolist(), driven.gradients()

    ranks = LocalWorld(3).run(run)

    for seen, weights, _ in ranks:
        assert seen == [0.0, count, 0.0]
        # Adam moves by its rate while gradients stay the same: two steps were applied.
        assert weights == pytest.approx([0.0] * 5, abs=1e-5)
    assert assemble(parts for _, _, parts in ranks)["a"].tolist() == [3.0] * 5


@EVERY_WAY
def test_what_the_user_does_to_reduced_gradients_is_in_the_norm_and_the_update(way: Way) -> None:
    def run(comm: Communicator) -> tuple[float, list[float]]:
        driven = on("dp=2", way, lambda mesh: Weighted({"w": 4}), comm)
        driven.reduce([partial(driven.parallel.module, w=[1.0] * 4)])
        for piece in driven.parallel.pieces.values():
            piece.parameter.grad.fill_(3.0)
        norm = float(totals(driven).norm)
        groups = parameter_groups(driven.parallel, lambda spec: True)
        torch.optim.SGD(groups, lr=1.0).step()
        driven.parallel.publish()
        return norm, driven.weights()["w"].tolist()

    for norm, weights in LocalWorld(2).run(run):
        assert norm == pytest.approx(6.0)
        assert weights == [-2.0] * 4


# At stage 0 pieces in float32 are the module's parameters, with the gradient of this rank alone.
@pytest.mark.parametrize("way", [way for way in WAYS if way.stage > 0], ids=str)
def test_clipping_at_every_micro_batch_acts_once_on_the_reduced_gradient(way: Way) -> None:
    def run(comm: Communicator) -> tuple[list[float], list[Any]]:
        driven = on("dp=2", way, lambda mesh: Weighted({"w": 1}), comm)
        pieces = [piece.parameter for piece in driven.parallel.pieces.values()]
        norms: list[float] = []
        for _ in range(2):
            driven.accumulate(partial(driven.parallel.module, w=[0.5]))
            norms.append(float(nn.utils.clip_grad_norm_(pieces, 0.125)))
        driven.parallel.reduce()
        driven.parallel.wait()
        return norms, driven.gradients()

    ranks = LocalWorld(2).run(run)

    assert assemble(parts for _, parts in ranks)["w"].tolist() == [2.0]
    assert [norms for norms, _ in ranks] == [[0.0, 0.0]] * 2


@EVERY_WAY
def test_sixteen_bit_gradients_have_one_norm_at_every_stage_and_step(way: Way) -> None:
    def run(comm: Communicator) -> list[float]:
        driven = on("dp=2", way, lambda mesh: Weighted({"w": 9}, torch.bfloat16), comm)
        norms: list[float] = []
        for _ in range(3):
            driven.reduce([partial(driven.parallel.module, w=[0.5] * 9)] * 2)
            norms.append(float(totals(driven).norm))
        return norms

    for norms in LocalWorld(2).run(run):
        assert norms == pytest.approx([6.0] * 3)


class Matrices(nn.Module):
    """A small network whose matrices Muon updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, scale: float) -> torch.Tensor:
        inputs = torch.linspace(-1, 1, 8).view(2, 4)
        return self.second(torch.relu(self.first(inputs))).square().sum() * scale


@pytest.mark.parametrize("way", ONCE_A_STEP, ids=str)
def test_clipping_takes_the_norm_of_raw_gradients_before_muon(way: Way) -> None:
    plain = Matrices()
    plain(2.0).backward()
    raw = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    torch.optim.Muon([p for p in plain.parameters() if p.ndim == 2], lr=0.25).step()

    def run(comm: Communicator) -> tuple[float, dict[str, torch.Tensor]]:
        driven = on("dp=2", way, lambda mesh: Matrices(), comm)
        matrices = [name for name, p in plain.named_parameters() if p.ndim == 2]
        muon = WholeMatrices(driven.parallel, matrices, partial(torch.optim.Muon, lr=0.25))
        driven.reduce([partial(driven.parallel.module, [2.0, 0.0][comm.rank])])
        norm = clip(driven, 0.5)
        muon.step()
        driven.parallel.publish()
        return norm, driven.weights()

    for norm, weights in LocalWorld(2).run(run):
        assert norm == pytest.approx(raw, rel=1e-6)
        for name, parameter in plain.named_parameters():
            # One bfloat16 rounding inside Muon may fall to the other side: 2^-8 of the update.
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=4e-3)


@attrs.define(eq=False)
class LateWork:
    """An operation that only begins when it is waited for."""

    start: Callable[[], Any]
    done: bool = False

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.done:
            self.done = True
            self.start().wait()


class LateGathers:
    """A communicator whose gathered weights arrive at the last moment."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, **options: Any) -> LateWork:
        mine = input.clone()
        output.fill_(77.0)
        input.copy_(mine)  # which may be a part of the output
        return LateWork(lambda: self._inner.all_gather(output, input, **options))

    def split(self, color: int | None, key: int = 0) -> Any:
        part = self._inner.split(color, key)
        return None if part is None else LateGathers(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@EVERY_WAY
def test_no_forward_and_no_export_reads_weights_that_are_still_on_their_way(way: Way) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, total: torch.Tensor) -> torch.Tensor:
            return total + self.w.sum()

    def run(comm: Communicator) -> tuple[float, dict[str, torch.Tensor]]:
        late: Any = LateGathers(comm)
        mesh = Mesh(late, MeshShape(dp=2))
        model = nn.Sequential(Layer(), Layer())
        driven = way.drive(model, mesh, units=by_class(Layer))
        groups = parameter_groups(driven.parallel, lambda spec: True)
        optimizer = torch.optim.SGD(groups, lr=0.5)
        driven.reduce([partial(model, torch.zeros(()))])
        optimizer.step()
        driven.parallel.publish()
        exported = full_state_dict(driven.parallel)
        if not way.hooks:
            driven.parallel.await_weights()
        return model(torch.zeros(())).item(), exported

    results = LocalWorld(2).run(run)

    assert [total for total, _ in results] == [0.0, 0.0]
    assert [value.tolist() for value in results[0][1].values()] == [[0.0], [0.0]]
