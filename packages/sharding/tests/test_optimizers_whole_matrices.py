"""Optimizers that need whole matrices get them, and compute what they compute in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import LifecycleError, Mesh, MeshShape, ShardingError
from trainwright.sharding.data import (
    DataParallel,
    ShardPolicy,
    WholeMatrices,
    data_parallel,
    parameter_groups,
)
from trainwright.sharding.data.matrix_owners import assign_owners, plan_rounds
from trainwright.sharding.data.testing import Network, NetworkPlan, network_plans, wrap

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SHAPES = {"tall": (7, 3), "wide": (2, 5), "bias": (4,), "square": (3, 3), "row": (1, 6)}


def is_matrix(spec: Any) -> bool:
    return len(spec.global_shape) == 2


def is_not_matrix(spec: Any) -> bool:
    return not is_matrix(spec)


class Weighted(nn.Module):
    """Matrices and a vector; the gradient of each is what the forward weighs it with."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(number)
            self.register_parameter(
                name, nn.Parameter(torch.randint(-4, 5, shape, generator=generator).to(dtype))
            )

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for parameter in self.parameters():
            # Whole numbers: their sums over ranks are exact in any order.
            weights = torch.randint(-4, 5, parameter.shape, generator=generator)
            total = total + (parameter * weights).sum()
        return total


class Normalised(torch.optim.Optimizer):
    """Moves along the gradient of the whole parameter divided by its norm, ever more slowly.

    It counts its steps in the group, where some optimizers do.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["sum"] = state.get("sum", 0.0) + parameter.grad
                step = group["lr"] / group["steps"]
                parameter -= step * state["sum"] / (state["sum"].norm() + 1)


Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def train_serial(module: nn.Module, factory: Factory, ranks: int, steps: int) -> None:
    """Train with ``factory`` on matrices and SGD on the rest, in one process."""
    matrices = factory([p for p in module.parameters() if p.ndim == 2])
    rest = torch.optim.SGD([p for p in module.parameters() if p.ndim != 2], lr=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(matrices, lambda step: 1 / (step + 1))
    for step in range(steps):
        module.zero_grad()
        for rank in range(ranks):
            module(step * 8 + rank).backward()
        matrices.step()
        rest.step()
        scheduler.step()


@attrs.define
class Trainer:
    """The same in a data-parallel run."""

    parallel: DataParallel
    matrices: WholeMatrices
    rest: torch.optim.Optimizer
    rank: int

    @classmethod
    def of(cls, parallel: DataParallel, factory: Factory, rank: int, **options: Any) -> Trainer:
        matrices = WholeMatrices(parallel, is_matrix, factory, **options)
        rest = torch.optim.SGD(parameter_groups(parallel, is_not_matrix), lr=0.25)
        return cls(parallel, matrices, rest, rank)

    def train(self, steps: Iterable[int]) -> dict[str, torch.Tensor]:
        """Train and return the module's weights."""
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.matrices, lambda step: 1 / (step + 1))
        for step in steps:
            self.reduce_gradients(step)
            self.matrices.step()
            self.rest.step()
            self.parallel.publish()
            self.parallel.await_weights()
            scheduler.step()
        return {name: p.detach().clone() for name, p in self.parallel.module.named_parameters()}

    def reduce_gradients(self, step: int) -> None:
        """Go through a step up to the optimizer."""
        self.parallel.zero_grad()
        self.parallel.module(step * 8 + self.rank).backward()
        self.parallel.reduce()
        self.parallel.wait()


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype"),
    [
        *((stage, ranks, torch.float32) for stage in range(4) for ranks in range(1, 5)),
        *((stage, 3, torch.float64) for stage in range(4)),
    ],
    ids=str,
)
def test_muon_updates_the_matrices_that_it_updates_in_one_process(
    stage: int, ranks: int, dtype: torch.dtype
) -> None:
    muon = functools.partial(torch.optim.Muon, lr=0.25)
    expected = Weighted(dtype)
    train_serial(expected, muon, ranks, steps=2)

    def run(comm: Communicator) -> dict[str, torch.Tensor]:
        parallel = wrap(Weighted(dtype), comm, stage=stage)
        return Trainer.of(parallel, muon, comm.rank, round_bytes=60).train(range(2))

    for found in LocalWorld(ranks).run(run):
        for name, parameter in expected.named_parameters():
            assert torch.equal(found[name], parameter.detach())


@given(
    plan=network_plans(),
    stage=st.integers(0, 3),
    ranks=st.integers(1, 4),
    round_bytes=st.sampled_from([1, 100, 10**6]),
    alignment=st.sampled_from([1, 4]),
)
def test_whole_matrices_of_any_model_are_those_of_one_process(
    plan: NetworkPlan, stage: int, ranks: int, round_bytes: int, alignment: int
) -> None:
    inputs = torch.linspace(-1, 1, ranks * plan.inputs, dtype=plan.dtype).view(ranks, -1)
    serial = Network(plan)
    trained = {n: p for n, p in serial.named_parameters() if p.requires_grad and p.ndim == 2}
    trained = {name: p for name, p in trained.items() if p.numel()}
    optimizers = {name: Normalised([p]) for name, p in trained.items()}
    for _ in range(2):
        serial.zero_grad()
        serial(inputs).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()

    def run(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        parallel = wrap(Network(plan), comm, stage=stage, alignment=alignment)
        matrices = WholeMatrices(parallel, is_matrix, Normalised, round_bytes=round_bytes)
        for _ in range(2):
            parallel.zero_grad()
            parallel.module(inputs[comm.rank : comm.rank + 1]).square().sum().backward()
            parallel.reduce()
            parallel.wait()
            matrices.step()
            parallel.publish()
            parallel.await_weights()
        weights = {name: p.detach().clone() for name, p in parallel.module.named_parameters()}
        return weights, matrices.state_dict()["state"]

    results = LocalWorld(ranks).run(run)

    for weights, states in results:
        for name, parameter in serial.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-10, atol=1e-12)
        for name, state in states.items():
            expected = optimizers[name].state[trained[name]]["sum"]
            torch.testing.assert_close(state["sum"], expected, rtol=1e-10, atol=1e-12)
    owned = [name for _, states in results for name in states]
    assert sorted(owned) == sorted(list(trained) * (ranks if stage == 0 else 1))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_hybrid_mesh_updates_each_copy_alike(stage: int) -> None:
    muon = functools.partial(torch.optim.Muon, lr=0.25)
    expected = Weighted()
    train_serial(expected, muon, ranks=4, steps=2)

    def run(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        mesh = Mesh(comm, MeshShape(dp=4, dp_shard=2))
        parallel = data_parallel(Weighted(), mesh, ShardPolicy(stage=stage))
        trainer = Trainer.of(parallel, muon, comm.rank)
        return trainer.train(range(2)), trainer.matrices.owned

    results = LocalWorld(4).run(run)

    for weights, _ in results:
        for name, parameter in expected.named_parameters():
            assert torch.equal(weights[name], parameter.detach())
    replicated = {
        axis for _, owned in results for spec in owned.values() for axis in spec.replicated
    }
    assert "dp_replicate" in replicated
    assert not replicated & {"dp", "dp_shard"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_matrices_of_two_dtypes_are_updated_in_their_own(stage: int) -> None:
    class Mixed(Weighted):
        def __init__(self) -> None:
            super().__init__()
            self.wide.data = self.wide.data.double()
            self.tall.data = self.tall.data.bfloat16()

    def run(comm: Communicator) -> dict[str, torch.dtype]:
        parallel = wrap(Mixed(), comm, stage=stage)
        trainer = Trainer.of(parallel, Normalised, comm.rank)
        trainer.train(range(2))
        state = trainer.matrices.state_dict()["state"]
        return {name: value["sum"].dtype for name, value in state.items()}

    first, second = LocalWorld(2).run(run)

    assert {**first, **second} == {
        "tall": torch.float32,
        "wide": torch.float64,
        "square": torch.float32,
        "row": torch.float32,
    }


@STAGES
def test_states_by_name_load_in_another_layout_and_training_goes_on(stage: int) -> None:
    expected = Weighted(torch.float64)
    train_serial(expected, lambda params: _each(params), ranks=2, steps=4)

    def first_half(comm: Communicator) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        parallel = wrap(Weighted(torch.float64), comm, stage=1)
        trainer = Trainer.of(parallel, Normalised, comm.rank)
        weights = trainer.train(range(2))
        return weights, trainer.matrices.state_dict()

    saved = LocalWorld(2).run(first_half)
    merged = {
        "param_groups": saved[0][1]["param_groups"],
        "state": {name: value for _, state in saved for name, value in state["state"].items()},
        "groups": {name: value for _, state in saved for name, value in state["groups"].items()},
    }

    def second_half(comm: Communicator) -> dict[str, torch.Tensor]:
        module = Weighted(torch.float64)
        module.load_state_dict(saved[0][0])
        parallel = wrap(module, comm, stage=stage)
        trainer = Trainer.of(parallel, Normalised, comm.rank)
        trainer.matrices.load_state_dict(merged)
        assert trainer.matrices.param_groups[0]["lr"] == pytest.approx(0.5 / 3)
        rates = torch.optim.lr_scheduler.LambdaLR(trainer.matrices, lambda step: 1 / (step + 3))
        for step in range(2, 4):
            trainer.reduce_gradients(step) if comm.rank < 2 else _reduce_nothing(parallel)
            trainer.matrices.step()
            trainer.rest.step()
            parallel.publish()
            parallel.await_weights()
            rates.step()
        return {name: p.detach().clone() for name, p in parallel.module.named_parameters()}

    for found in LocalWorld(3).run(second_half):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-12, atol=1e-12)


def _reduce_nothing(parallel: DataParallel) -> None:
    parallel.zero_grad()
    parallel.reduce()
    parallel.wait()


class _Each(torch.optim.Optimizer):
    """One `Normalised` a parameter under one group, as one process would write it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.inner = [Normalised([parameter]) for parameter in params]
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: None = None) -> None:
        for optimizer in self.inner:
            optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            optimizer.step()


def _each(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return _Each(params)


class Messages:
    """A communicator that notes the size of each all-to-all it starts."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.sent: list[int] = []

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, *splits: Any) -> Any:
        self.sent.append(input.numel())
        return self._inner.all_to_all(output, input, *splits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_each_kept_element_three_times_and_little_at_once(stage: int) -> None:
    def run(comm: Communicator) -> tuple[list[int], int, int]:
        messages = Messages(comm)
        parallel = wrap(Weighted(), messages, stage=stage)  # type: ignore[arg-type]
        trainer = Trainer.of(parallel, Normalised, comm.rank, round_bytes=4 * 21)
        trainer.reduce_gradients(0)
        before = len(messages.sent)
        trainer.matrices.step()
        owned = sum(spec.total for spec in trainer.matrices.owned.values())
        kept = sum(p.numel() for p in trainer.matrices.param_groups[0]["params"])
        return messages.sent[before:], kept, owned

    for sent, kept, owned in LocalWorld(2).run(run):
        assert sum(sent) == 2 * kept + owned
        assert max(sent) <= 2 * 2 * 21  # two owners' matrices and gradients, in part
        assert len(sent) == 2 * 2  # there and back, in two rounds


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    ranks=st.integers(1, 8),
    most=st.integers(1, 100),
)
def test_owners_carry_about_the_same_and_rounds_hold_little(
    sizes: list[int], ranks: int, most: int
) -> None:
    named = {f"m{number}": size for number, size in enumerate(sizes)}

    owners = assign_owners(named, ranks)
    rounds = plan_rounds(owners, named, ranks, most)

    loads = [sum(named[n] for n, owner in owners.items() if owner == r) for r in range(ranks)]
    assert max(loads) <= sum(sizes) / ranks + max(sizes)
    assert list(owners) == list(named)
    seen = [name for turn in rounds for share in turn.owned for name in share]
    assert sorted(seen) == sorted(named)
    for turn in rounds:
        assert len(turn.owned) == ranks
        for rank, share in enumerate(turn.owned):
            assert all(owners[name] == rank for name in share)
            assert len(share) <= 1 or sum(named[name] for name in share) <= most


def test_the_largest_matrix_is_given_out_first() -> None:
    owners = assign_owners({"small": 1, "other": 1, "large": 2}, 2)

    assert owners == {"small": 1, "other": 1, "large": 0}


@STAGES
def test_the_group_lists_this_ranks_pieces_and_goes_with_a_scheduler(stage: int) -> None:
    def run(comm: Communicator) -> tuple[list[str], tuple[str, ...]]:
        parallel = wrap(Weighted(), comm, stage=stage)
        matrices = WholeMatrices(parallel, ["wide", "row"], torch.optim.Muon)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            matrices, max_lr=1.0, total_steps=4, cycle_momentum=False
        )
        (group,) = matrices.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert parameter is parallel.pieces[name].parameter
        parallel.reduce()
        parallel.wait()
        matrices.step()
        scheduler.step()
        matrices.zero_grad()
        assert all(parameter.grad is None for parameter in group["params"])
        return group["param_names"], matrices.names

    for names, everywhere in LocalWorld(3).run(run):
        assert everywhere == ("wide", "row")
        assert set(names) <= set(everywhere)


def test_a_rate_that_is_changed_reaches_the_update_and_counters_in_the_group_go_on() -> None:
    parallel = wrap(Weighted(torch.float64), stage=1)
    trainer = Trainer.of(parallel, Normalised, 0)

    for rate in (0.5, 0.5, 0.0):
        trainer.matrices.param_groups[0]["lr"] = rate
        trainer.reduce_gradients(0)
        before = parallel.module.get_parameter("tall").detach().clone()
        trainer.matrices.step()
        parallel.publish()
    after = parallel.module.get_parameter("tall").detach()

    assert torch.equal(before, after)
    groups = trainer.matrices.state_dict()["groups"]
    assert {group["steps"] for group in groups.values()} == {3}


def test_a_closure_is_run_once_before_the_update() -> None:
    parallel = wrap(Weighted(), stage=1)
    trainer = Trainer.of(parallel, Normalised, 0)
    calls: list[int] = []

    def closure() -> float:
        trainer.reduce_gradients(len(calls))
        calls.append(1)
        return 2.5

    assert trainer.matrices.step(closure) == 2.5
    assert calls == [1]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_before_the_gradients_are_reduced_is_refused(stage: int) -> None:
    def run(comm: Communicator) -> None:
        parallel = wrap(Weighted(), comm, stage=stage)
        matrices = WholeMatrices(parallel, ["tall"], torch.optim.Muon)
        parallel.module(comm.rank).backward()
        if stage == 0:
            parallel.zero_grad(discard=True)
        with pytest.raises(LifecycleError, match="has no reduced gradient"):
            matrices.step()

    LocalWorld(2).run(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved["param_groups"][0]["params"].remove("row"), "row are in one only"),
        (lambda saved: saved["state"].pop("tall"), "no state of tall, which this rank owns"),
    ],
)
def test_a_state_of_other_matrices_is_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    matrices = WholeMatrices(wrap(Weighted(), stage=1), is_matrix, torch.optim.Muon)
    saved = matrices.state_dict()
    change(saved)

    with pytest.raises(ShardingError, match=message):
        matrices.load_state_dict(saved)


def test_whole_matrices_of_nothing_and_later_groups_are_refused() -> None:
    parallel = wrap(Weighted(), stage=1)

    with pytest.raises(ShardingError, match="no trainable parameter"):
        WholeMatrices(parallel, [], torch.optim.Muon)
    with pytest.raises(ShardingError, match="did you mean 'tall'"):
        WholeMatrices(parallel, ["tal"], torch.optim.Muon)
    matrices = WholeMatrices(parallel, ["tall"], torch.optim.Muon)
    with pytest.raises(ShardingError, match="takes no further groups"):
        matrices.add_param_group({"params": []})
