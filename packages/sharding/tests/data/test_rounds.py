"""Reductions after every backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import LifecycleError, ShardPolicy, data_parallel
from trainwright.sharding.data.testing import (
    RecordedCall,
    RecordingCommunicator,
    Scalars,
    finish,
    wrap,
)
from trainwright.sharding.mesh import Mesh, MeshShape


def on_two_ranks(run) -> dict[str, float]:  # type: ignore[no-untyped-def]
    merged: dict[str, float] = {}
    for found in LocalWorld(2).run(run):
        merged.update(found)
    return merged


def test_each_backward_is_reduced_once_before_it_returns() -> None:
    def run(comm: Communicator) -> list[int]:
        calls: list[RecordedCall] = []
        model = Scalars("a", "b")
        parallel = wrap(
            model, RecordingCommunicator(comm, calls), stage=2, reduce_each_backward=True
        )
        calls.clear()
        counts = []
        for _ in range(3):
            (model.a + model.b).backward()
            counts.append(sum(call.operation == "reduce_scatter" for call in calls))
        parallel.reduce()
        parallel.wait()
        return [*counts, sum(call.operation == "reduce_scatter" for call in calls)]

    assert LocalWorld(2).run(run) == [[1, 2, 3, 3]] * 2


@pytest.mark.parametrize("num_backwards", [(0, 0), (3, 0), (0, 2), (1, 3)])
def test_ranks_with_different_numbers_of_backwards_add_zeros(
    num_backwards: tuple[int, int],
) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=2, reduce_each_backward=True)
        for step in range(2):
            parallel.zero_grad()
            for _ in range(num_backwards[comm.rank]):
                (model.a * (step + 1)).backward()
            found = finish(parallel)
        return found

    assert on_two_ranks(run) == {"a": 2.0 * sum(num_backwards), "b": 0.0}


def test_ranks_that_use_other_parameters_in_each_micro_batch_never_mix_them_up() -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b", "c")
        parallel = wrap(model, comm, stage=2, bucket_bytes=1, reduce_each_backward=True)
        for names in (("ab", "c"), ("b", "a"))[comm.rank]:
            sum(getattr(model, name) * 5 for name in names).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 10.0, "b": 10.0, "c": 5.0}


def test_gradients_written_by_hand_are_reduced_at_the_end() -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=2, reduce_each_backward=True)
        model.a.backward()
        model.b.grad = torch.full_like(model.b, 3.0)
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 2.0, "b": 6.0}


def test_a_gradient_of_an_earlier_step_is_never_applied_again() -> None:
    def run(comm: Communicator) -> list[dict[str, float]]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=2, reduce_each_backward=True)
        found = []
        for step in range(3):
            parallel.zero_grad()
            if step < 2:
                (model.a + model.b if step == 0 else model.a).backward()
            found.append(finish(parallel))
        return found

    results = LocalWorld(2).run(run)
    for step in range(3):
        merged = {name: value for found in results for name, value in found[step].items()}
        assert merged == {"a": 2.0 if step < 2 else 0.0, "b": 2.0 if step == 0 else 0.0}


def test_a_backward_after_reduce_is_refused() -> None:
    def run(comm: Communicator) -> None:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=2, reduce_each_backward=True)
        model.a.backward()
        parallel.reduce()
        with pytest.raises(LifecycleError, match="gradient of a arrived: backward after reduce"):
            model.a.backward()
        with pytest.raises(LifecycleError, match="while gradients are being reduced"):
            parallel.zero_grad()
        parallel.wait()
        with pytest.raises(LifecycleError, match="last_backward"):
            parallel.last_backward()

    LocalWorld(2).run(run)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_hooks_every_reduce_is_a_round(num_ranks: int) -> None:
    def run(comm: Communicator) -> tuple[dict[str, float], int]:
        calls: list[RecordedCall] = []
        model = Scalars("a", "b")
        mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=2, alignment=1, reduce_each_backward=True)
        parallel = data_parallel(model, mesh, policy, hooks=False)
        calls.clear()
        with pytest.raises(LifecycleError, match="before reduce"):
            parallel.wait()
        for factor in (1.0, 2.0, 4.0):
            (model.a * factor).backward()
            (model.b * factor).backward()
            parallel.reduce()
        with pytest.raises(LifecycleError, match="while gradients are being reduced"):
            parallel.zero_grad()
        parallel.wait()
        gradients = {name: p.parameter.grad.item() for name, p in parallel.pieces.items()}
        return gradients, len(calls)

    results = LocalWorld(num_ranks).run(run)

    merged = {name: value for found, _ in results for name, value in found.items()}
    assert merged == {"a": 7.0 * num_ranks, "b": 7.0 * num_ranks}
    assert {count for _, count in results} == {3 if num_ranks > 1 else 0}


def test_without_hooks_gradients_after_the_last_round_are_told() -> None:
    def run(comm: Communicator) -> None:
        model = Scalars("a", "b")
        mesh = Mesh(comm, MeshShape(dp=comm.size))
        policy = ShardPolicy(stage=2, alignment=1, reduce_each_backward=True)
        parallel = data_parallel(model, mesh, policy, hooks=False)
        model.a.backward()
        parallel.reduce()
        model.a.backward()
        with pytest.raises(LifecycleError, match="came after the last reduce"):
            parallel.wait()
        parallel.reduce()
        parallel.wait()
        with pytest.raises(LifecycleError, match="arrived: backward after reduce"):
            model.a.backward()

    LocalWorld(2).run(run)


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_rounds_add_up_in_the_masters_dtype(reduce_dtype: torch.dtype | None) -> None:
    def run(comm: Communicator) -> set[float]:
        model = nn.Linear(1, 4, bias=False, dtype=torch.bfloat16)
        parallel = wrap(model, comm, stage=2, reduce_dtype=reduce_dtype, reduce_each_backward=True)
        for size in (1.0, 2.0**-10, 2.0**-10):
            model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
        parallel.reduce()
        parallel.wait()
        return {v for p in parallel.pieces.values() for v in p.parameter.grad.tolist()}

    # bfloat16 would round the small ones away.
    assert LocalWorld(2).run(run) == [{2.0 + 2.0**-8}] * 2
