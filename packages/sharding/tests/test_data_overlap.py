"""When reductions start, in which order, and how much they move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import DataParallel, ShardPolicy, by_class
from trainwright.sharding.data.testing import (
    Network,
    NetworkPlan,
    RecordedCall,
    RecordingCommunicator,
    wrap_on,
)
from trainwright.sharding.mesh import Mesh, MeshShape

PLAN = NetworkPlan(hidden=4, depth=3)
# One bucket for each parameter of the plan when a bucket holds one byte; at stage 3 for each layer.
NUM_BUCKETS = {0: 9, 1: 9, 2: 9, 3: 5}


def make(
    comm: Communicator, calls: list[RecordedCall], model: nn.Module, **policy: object
) -> DataParallel:
    mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape(dp=comm.size))
    chosen = {"bucket_bytes": 1, "units": by_class(nn.Linear), **policy}
    parallel = wrap_on(mesh, model, ShardPolicy(**chosen))
    calls.clear()
    return parallel


def backward(parallel: DataParallel, skipped: frozenset[int] = frozenset()) -> None:
    parallel.module(torch.ones(2, PLAN.inputs, dtype=PLAN.dtype), skipped).sum().backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_reduction_starts_while_the_last_backward_still_runs(stage: int) -> None:
    def run(comm: Communicator) -> list[int]:
        calls: list[RecordedCall] = []
        model = Network(PLAN)
        parallel = make(comm, calls, model, stage=stage)
        seen: list[int] = []
        hidden = torch.tanh(model.first(torch.ones(2, PLAN.inputs, dtype=PLAN.dtype)))
        hidden.register_hook(lambda _: seen.append(len(calls)))
        for layer in model.layers:
            hidden = torch.tanh(layer(hidden))
        loss = model.last(hidden).sum()
        parallel.last_backward()
        loss.backward()
        seen.append(len(calls))
        parallel.reduce()
        parallel.wait()
        seen.append(len(calls))
        return seen

    for seen in LocalWorld(2).run(run):
        # All but the first layer's before its backward, everything before reduce().
        every = NUM_BUCKETS[stage]
        assert seen == [every - (1 if stage == 3 else 2), every, every]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_last_backward_nothing_is_sent_before_reduce(stage: int) -> None:
    def run(comm: Communicator) -> list[int]:
        calls: list[RecordedCall] = []
        parallel = make(comm, calls, Network(PLAN), stage=stage)
        backward(parallel)
        backward(parallel)
        before = len(calls)
        parallel.reduce()
        return [before, len(calls)]

    assert LocalWorld(2).run(run) == [[0, NUM_BUCKETS[stage]]] * 2


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    num_ranks=st.integers(2, 5),
    num_microbatches=st.integers(0, 3),
    bucket_bytes=st.sampled_from([1, 300, 10**6]),
    skips=st.lists(st.frozensets(st.integers(0, 2)), min_size=15, max_size=15),
)
def test_each_bucket_is_reduced_once_in_the_same_order_whatever_ranks_skip(
    stage: int,
    num_ranks: int,
    num_microbatches: int,
    bucket_bytes: int,
    skips: list[frozenset[int]],
) -> None:
    def run(comm: Communicator) -> tuple[list[RecordedCall], int]:
        calls: list[RecordedCall] = []
        parallel = make(comm, calls, Network(PLAN), stage=stage, bucket_bytes=bucket_bytes)
        for microbatch in range(num_microbatches):
            if microbatch == num_microbatches - 1:
                parallel.last_backward()
            backward(parallel, skips[comm.rank * 3 + microbatch])
        parallel.reduce()
        parallel.reduce()
        parallel.wait()
        return calls, sum(len(group.buckets) for group in parallel.layout)

    results = LocalWorld(num_ranks).run(run)

    operation = "reduce_scatter" if stage else "all_reduce"
    for calls, num_buckets in results:
        assert [call.operation for call in calls] == [operation] * num_buckets
        assert [c.numel for c in calls] == [c.numel for c in results[0][0]]


def test_a_bucket_whose_predecessor_is_incomplete_waits_for_reduce() -> None:
    def run(comm: Communicator) -> list[int]:
        calls: list[RecordedCall] = []
        model = Network(PLAN)
        parallel = make(comm, calls, model)
        parallel.last_backward()
        # Only the last layer's bucket, which is the first, stays incomplete.
        torch.tanh(model.first(torch.ones(1, PLAN.inputs, dtype=PLAN.dtype))).sum().backward()
        before = len(calls)
        parallel.reduce()
        parallel.wait()
        return [before, len(calls)]

    assert LocalWorld(2).run(run) == [[0, NUM_BUCKETS[0]]] * 2


def test_a_step_moves_one_reduction_and_a_gather_of_all_elements_where_weights_are_cut() -> None:
    def run(comm: Communicator, stage: int) -> list[tuple[str, int]]:
        calls: list[RecordedCall] = []
        model = Network(NetworkPlan(inputs=4, hidden=8, depth=2, outputs=4))
        policy = {"stage": stage, "alignment": 1, "bucket_bytes": 10**6, "units": None}
        parallel = make(comm, calls, model, **policy)
        parallel.release()
        parallel.await_weights()
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        parallel.reduce()
        parallel.wait()
        parallel.publish()
        return [(call.operation, call.numel) for call in calls]

    total = 4 * 8 + 8 + 2 * (64 + 8) + 32
    reduced, gathered = ("reduce_scatter", total), ("all_gather", total)
    assert LocalWorld(2).run(run, 0) == [[("all_reduce", total)]] * 2
    assert LocalWorld(2).run(run, 1) == [[reduced, gathered]] * 2
    assert LocalWorld(2).run(run, 2) == [[reduced, gathered]] * 2
    assert LocalWorld(2).run(run, 3) == [[gathered, reduced]] * 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_alone_communicates_nothing(stage: int) -> None:
    def run(comm: Communicator) -> int:
        calls: list[RecordedCall] = []
        mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape())
        parallel = wrap_on(mesh, Network(PLAN), ShardPolicy(stage=stage))
        parallel.last_backward()
        backward(parallel)
        parallel.reduce()
        parallel.wait()
        parallel.publish()
        return len(calls)

    assert LocalWorld(1).run(run) == [0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_travel_in_the_reduce_dtype_and_arrive_in_float32(stage: int) -> None:
    def run(comm: Communicator) -> tuple[set[torch.dtype], list[float], set[torch.dtype]]:
        calls: list[RecordedCall] = []
        model = nn.Linear(1, 4, bias=False)
        parallel = make(comm, calls, model, stage=stage, reduce_dtype=torch.bfloat16, alignment=1)
        model(torch.full((1, 1), 1.0 + 2.0**-7 + 2.0**-12)).sum().backward()
        parallel.reduce()
        parallel.wait()
        gradients = [piece.parameter.grad for piece in parallel.pieces.values()]
        values = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
        return {call.dtype for call in calls}, values, {g.dtype for g in gradients}

    for sent, values, arrived in LocalWorld(2).run(run):
        assert sent == {torch.bfloat16}
        assert arrived == {torch.float32}
        # Each rank's gradient is rounded to bfloat16, their sum is exact there.
        assert set(values) == {2.0 + 2.0**-6}
