"""Training with offloaded states computes, bit for bit, what it computes without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.data import (
    DataParallel,
    ShardPolicy,
    by_name,
    data_parallel,
    offloaded_step,
    parameter_groups,
)
from trainwright.sharding.data.testing import Network, NetworkPlan, network_plans
from trainwright.sharding.offload import Offload, OffloadedStep, offload_to_folder, offload_to_host

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "AMSGrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.5),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, momentum=0.5, centered=True),
    "Rprop": lambda groups: torch.optim.Rprop(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
}


@attrs.frozen
class Case:
    """A run to be made with and without offload."""

    plan: NetworkPlan
    ranks: int
    stage: int
    optimizer: str = "AdamW"
    narrow: bool = False
    each_backward: bool = False
    reduce_dtype: torch.dtype | None = None
    microbatches: int = 2
    steps: int = 3


cases = st.builds(
    Case,
    plan=network_plans([torch.float32, torch.float64]),
    ranks=st.integers(1, 3),
    stage=st.integers(0, 3),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    narrow=st.booleans(),
    each_backward=st.booleans(),
    microbatches=st.integers(1, 3),
)


def build(
    world: Communicator, case: Case, offload: Offload | None
) -> tuple[DataParallel, torch.optim.Optimizer, OffloadedStep | torch.optim.Optimizer]:
    model = Network(case.plan)
    policy = ShardPolicy(
        stage=case.stage,
        alignment=1,
        bucket_bytes=300,
        units=by_name("layers.*"),
        parameter_dtype=(lambda name, parameter: torch.bfloat16) if case.narrow else None,
        reduce_each_backward=case.each_backward and case.stage > 1,
        reduce_dtype=case.reduce_dtype,
    )
    mesh = Mesh(world, MeshShape(dp=world.size))
    parallel = data_parallel(model, mesh, policy, offload=offload)
    groups = parameter_groups(parallel, [p for p in model.parameters() if p.requires_grad])
    optimizer = OPTIMIZERS[case.optimizer](groups)
    if offload is None:
        return parallel, optimizer, optimizer
    return parallel, optimizer, offloaded_step(optimizer, [parallel], offload)


def backward(parallel: DataParallel, case: Case, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + parallel.mesh.rank)
    dtype = torch.bfloat16 if case.narrow else case.plan.dtype
    for number in range(case.microbatches):
        inputs = torch.randn(2, case.plan.inputs, generator=generator, dtype=dtype)
        if number == case.microbatches - 1:
            parallel.last_backward()
        parallel.module(inputs).square().sum().backward()
    parallel.reduce()
    parallel.wait()


def kept(parallel: DataParallel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, piece in parallel.pieces.items():
        found[name] = piece.parameter.detach().clone()
        for key, value in optimizer.state[piece.parameter].items():
            found[f"{name} {key}"] = torch.as_tensor(value).clone()
    parallel.await_weights()
    for name, parameter in parallel.module.named_parameters():
        found[f"weight {name}"] = parameter.detach().clone()
    return found


def train(
    world: Communicator, case: Case, make: Callable[[], Offload] | None
) -> dict[str, torch.Tensor]:
    parallel, optimizer, stepping = build(world, case, None if make is None else make())
    for step in range(case.steps):
        parallel.zero_grad()
        backward(parallel, case, step)
        stepping.step()
        parallel.publish()
    return kept(parallel, optimizer)


def assert_same(case: Case, make: Callable[[], Offload]) -> None:
    wanted = LocalWorld(case.ranks, timeout_s=60.0).run(train, case, None)
    found = LocalWorld(case.ranks, timeout_s=60.0).run(train, case, make)
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        differing = [name for name in one if not torch.equal(one[name], other[name])]
        assert not differing


@given(case=cases, weights=st.booleans())
def test_states_in_host_memory_change_no_bit(case: Case, weights: bool) -> None:
    assert_same(case, lambda: offload_to_host(weights=weights and case.stage == 3))


@given(case=cases, weights=st.booleans())
def test_states_in_a_file_change_no_bit(case: Case, weights: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert_same(case, lambda: offload_to_folder(folder, weights=weights and case.stage == 3))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_every_element_wise_optimizer_updates_states_where_they_are_kept(
    optimizer: str, to_file: bool
) -> None:
    case = Case(NetworkPlan(dtype=torch.float32, scalar=True), 2, 2, optimizer, narrow=True)
    with tempfile.TemporaryDirectory() as folder:
        assert_same(case, (lambda: offload_to_folder(folder)) if to_file else offload_to_host)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_moves_that_take_their_time_change_no_bit(stage: int) -> None:
    case = Case(NetworkPlan(dtype=torch.float32), 2, stage, each_backward=True, narrow=True)
    with tempfile.TemporaryDirectory() as folder:
        assert_same(case, lambda: offload_to_host(weights=stage == 3, link_bytes_s=1e6))
        assert_same(case, lambda: offload_to_folder(folder, link_bytes_s=1e6, file_bytes_s=1e6))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_in_sixteen_bits_reach_the_host_in_them(stage: int) -> None:
    moved: dict[torch.dtype | None, int] = {}
    for reduce_dtype in (None, torch.bfloat16):
        case = Case(NetworkPlan(dtype=torch.float32), 2, stage, reduce_dtype=reduce_dtype, steps=1)
        made: list[Offload] = []

        def make(made: list[Offload] = made) -> Offload:
            made.append(offload_to_host())
            return made[-1]

        assert_same(case, make)
        moved[reduce_dtype] = sum(offload.to_host.moved_bytes for offload in made)
    assert moved[None] == 2 * moved[torch.bfloat16] > 0


def test_a_lone_ranks_gradients_are_rounded_to_what_they_travel_in() -> None:
    case = Case(NetworkPlan(dtype=torch.float32), 1, 2, reduce_dtype=torch.bfloat16)

    def run(world: Communicator) -> list[torch.Tensor]:
        parallel, _, _ = build(world, case, offload_to_host())
        backward(parallel, case, 0)
        return [piece.parameter.grad.clone() for piece in parallel.pieces.values()]

    (found,) = LocalWorld(1).run(run)

    assert all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in found)


@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_what_changes_masters_between_update_and_publication_is_published(to_file: bool) -> None:
    case = Case(NetworkPlan(dtype=torch.float32), 2, 1, narrow=True)

    def run(world: Communicator, offload: Offload | None) -> dict[str, torch.Tensor]:
        parallel, optimizer, stepping = build(world, case, offload)
        backward(parallel, case, 0)
        stepping.step()
        with torch.no_grad():
            for piece in parallel.pieces.values():
                piece.parameter.mul_(0.5)
        parallel.publish()
        return kept(parallel, optimizer)

    with tempfile.TemporaryDirectory() as folder:
        wanted = LocalWorld(2).run(run, None)
        found = LocalWorld(2).run(
            lambda world: run(world, offload_to_folder(folder) if to_file else offload_to_host())
        )
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_gradients_that_somebody_has_replaced_are_those_that_count(to_file: bool) -> None:
    case = Case(NetworkPlan(dtype=torch.float32), 2, 2)

    def run(world: Communicator, offload: Offload | None) -> dict[str, torch.Tensor]:
        parallel, optimizer, stepping = build(world, case, offload)
        for step in range(2):
            parallel.zero_grad()
            backward(parallel, case, step)
            for number, piece in enumerate(parallel.pieces.values()):
                gradient = piece.parameter.grad
                assert gradient is not None
                if number % 2:
                    piece.parameter.grad = gradient * 3
                else:
                    gradient.mul_(0.5)
            stepping.step()
            parallel.publish()
        return kept(parallel, optimizer)

    with tempfile.TemporaryDirectory() as folder:
        wanted = LocalWorld(2).run(run, None)
        found = LocalWorld(2).run(
            lambda world: run(world, offload_to_folder(folder) if to_file else offload_to_host())
        )
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=8)
@given(stage=st.integers(0, 3), to_file=st.booleans(), each_backward=st.booleans())
def test_a_step_that_was_given_up_leaves_no_gradient(
    stage: int, to_file: bool, each_backward: bool
) -> None:
    case = Case(NetworkPlan(dtype=torch.float32), 2, stage, each_backward=each_backward)

    def run(world: Communicator, offload: Offload | None) -> dict[str, torch.Tensor]:
        parallel, optimizer, stepping = build(world, case, offload)
        parallel.module(torch.ones(1, case.plan.inputs)).sum().backward()
        parallel.zero_grad(discard=True)
        backward(parallel, case, 1)
        parallel.zero_grad()  # skipped
        backward(parallel, case, 2)
        stepping.step()
        parallel.publish()
        return kept(parallel, optimizer)

    with tempfile.TemporaryDirectory() as folder:
        wanted = LocalWorld(2).run(run, None)
        found = LocalWorld(2).run(
            lambda world: run(world, offload_to_folder(folder) if to_file else offload_to_host())
        )
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("to_file", [False, True], ids=["host", "file"])
def test_ranks_that_use_different_layers_gather_offloaded_weights_together(to_file: bool) -> None:
    plan = NetworkPlan(dtype=torch.float32, depth=5)
    case = Case(plan, 3, 3)

    def run(world: Communicator, offload: Offload | None) -> dict[str, torch.Tensor]:
        parallel, optimizer, stepping = build(world, case, offload)
        for step in range(3):
            parallel.zero_grad()
            parallel.last_backward()
            skipped = frozenset({(world.rank + step) % 5, (2 * world.rank) % 5})
            parallel.module(torch.ones(1, plan.inputs), skipped).sum().backward()
            parallel.reduce()
            parallel.wait()
            stepping.step()
            parallel.publish()
        return kept(parallel, optimizer)

    def away(world: Communicator) -> dict[str, torch.Tensor]:
        if not to_file:
            return run(world, offload_to_host(weights=True, link_bytes_s=1e5))
        return run(world, offload_to_folder(folder, weights=True, file_bytes_s=1e6))

    with tempfile.TemporaryDirectory() as folder:
        wanted = LocalWorld(3, timeout_s=30.0).run(run, None)
        found = LocalWorld(3, timeout_s=30.0).run(away)
    for one, other in zip(wanted, found, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
