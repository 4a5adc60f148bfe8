"""Flat buffers live where their communicator reads them, and compute the same there."""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SharedMemoryCommunicator
from trainwright.collectives.testing import run_processes
from trainwright.sharding.data import by_class
from trainwright.sharding.data.testing import Network, NetworkPlan
from trainwright.sharding.data.testing_ways import WAYS, Driven, Way
from trainwright.sharding.mesh import Mesh, MeshShape

NUM_STEPS = 3


class Placed:
    """A communicator with memory that is NaN at first, cannot be resized, and is known again."""

    def __init__(self, inner: Communicator, given: list[torch.Tensor]) -> None:
        self._inner = inner
        self._given = given

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        memory = torch.from_numpy(numpy.empty(num_bytes, numpy.uint8)).view(dtype)
        self._given.append(memory.fill_(torch.nan))
        return memory.view(shape)

    def split(self, color: int | None, key: int = 0) -> Placed | None:
        part = self._inner.split(color, key)
        return None if part is None else Placed(part, self._given)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in ("all_reduce", "reduce_scatter", "all_gather"):
            return value

        def call(*given: Any) -> Any:
            read = [tensor for tensor in given if isinstance(tensor, torch.Tensor)][-1]
            # Numbers that are agreed on are ordinary memory.
            assert not read.is_floating_point() or self._gave(read), name
            return value(*given)

        return call

    def _gave(self, tensor: torch.Tensor) -> bool:
        storages = {given.untyped_storage().data_ptr() for given in self._given}
        return tensor.untyped_storage().data_ptr() in storages


def place(comm: Communicator) -> Communicator:
    return Placed(comm, [])


def train(
    comm: Communicator, way: Way, width: int, dtype: torch.dtype, **policy: Any
) -> tuple[Driven, list[dict[str, torch.Tensor]]]:
    """Train a model with padding, a tied, a frozen and an unused weight; return its weights."""
    plan = NetworkPlan(hidden=width, depth=3, tied=True, frozen=True, unused=True, dtype=dtype)
    model = Network(plan)
    fields = {"alignment": 4, "units": by_class(nn.Linear), **policy}
    driven = way.drive(model, Mesh(comm, MeshShape(dp=comm.size)), **fields)
    pieces = driven.parallel.pieces.values()
    optimizer = torch.optim.SGD([piece.parameter for piece in pieces], lr=0.01, momentum=0.9)
    rows = torch.linspace(-1, 1, 6 * comm.size).view(comm.size, 2, 3)[comm.rank].to(dtype)
    found = []
    for _ in range(NUM_STEPS):
        losses = [lambda rows=rows: model(rows).float().square().sum() for _ in range(2)]
        driven.reduce(losses)
        optimizer.step()
        driven.parallel.publish()
        found.append(driven.weights())
    return driven, found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_memory_that_the_communicator_chooses_changes_nothing_and_holds_what_others_read(
    way: Way, dtype: torch.dtype
) -> None:
    def run(comm: Communicator, is_placed: bool) -> list[dict[str, torch.Tensor]]:
        driven, found = train(place(comm) if is_placed else comm, way, 5, dtype)
        buckets = [bucket for unit in driven.parallel.units.values() for bucket in unit.buckets]
        # Padding too, or the norm of a buffer would not be that of its gradients.
        assert all(b.sums.kept.isfinite().all() for b in buckets if b.gradients is not None)
        return found

    wanted = LocalWorld(2).run(run, False)

    assert_equal(LocalWorld(2).run(run, True), wanted)


def test_gradients_that_travel_in_another_dtype_travel_from_chosen_memory() -> None:
    def run(comm: Communicator, is_placed: bool) -> list[dict[str, torch.Tensor]]:
        comm = place(comm) if is_placed else comm
        return train(comm, Way(1), 5, torch.float32, reduce_dtype=torch.bfloat16)[1]

    wanted = LocalWorld(2).run(run, False)

    assert_equal(LocalWorld(2).run(run, True), wanted)


def assert_equal(
    found: list[list[dict[str, torch.Tensor]]], wanted: list[list[dict[str, torch.Tensor]]]
) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        for step, weights in enumerate(theirs):
            for name, weight in weights.items():
                assert torch.equal(ours[step][name], weight), f"step {step}: {name}"


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"),
    reason="shared memory between processes needs Linux on x86-64 or aarch64",
)
def test_over_shared_memory_every_stage_computes_what_it_does_over_gloo_without_copies() -> None:
    assert run_processes(over_both, 2, timeout_s=60.0) == [[0, 1, 2, 3]] * 2


def over_both(gloo: Communicator) -> list[int]:
    """Compare both in one process; the matrices are large enough to be read where they lie."""
    shm = SharedMemoryCommunicator(timeout_s=30.0)
    done = []
    for stage in range(4):
        _, wanted = train(gloo, Way(stage), 192, torch.float32)
        driven, found = train(shm, Way(stage), 192, torch.float32)
        assert_equal([found], [wanted])
        whole_gradients_live_in_the_segment_and_stay_what_they_are(driven, shm)
        done.append(stage)
    return done


def whole_gradients_live_in_the_segment_and_stay_what_they_are(
    driven: Driven, shm: SharedMemoryCommunicator
) -> None:
    parallel = driven.parallel
    model = parallel.module
    segment = shm._shared.domain.own
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(1, 3):
        parallel.zero_grad()
        (model(torch.ones(2, 3) * number).square().sum()).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all(segment.find(gradient) is not None for gradient in gradients)
        # Those of stages 2 and 3 are other memory in each step.
        assert driven.way.stage < 2 or all(torch.equal(*pair) for pair in kept)
        kept = [(gradient, gradient.clone()) for gradient in gradients]
        parallel.reduce()
        parallel.wait()
        parallel.publish()
