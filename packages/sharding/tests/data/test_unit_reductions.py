"""Units whose reduction is started by a caller."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import (
    DataParallel,
    LifecycleError,
    ShardPolicy,
    by_class,
    data_parallel,
)
from trainwright.sharding.data.reducer import Reducer
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator, wrap_on
from trainwright.sharding.mesh import Mesh, MeshShape

SIZES = (4, 6, 8)  # elements of each layer's weight: layer 2 is reduced first
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def make(
    comm: Communicator, stage: int, **policy: object
) -> tuple[DataParallel, nn.Sequential, list[RecordedCall]]:
    calls: list[RecordedCall] = []
    model = nn.Sequential(*(Layer(size) for size in SIZES))
    mesh = Mesh(RecordingCommunicator(comm, calls), MeshShape(dp=comm.size))
    chosen = {"stage": stage, "units": by_class(Layer), "alignment": 1, **policy}
    parallel = wrap_on(mesh, model, ShardPolicy(**chosen))
    calls.clear()
    return parallel, model, calls


def reduced(calls: list[RecordedCall]) -> list[int]:
    return [call.numel for call in calls]


@STAGES
def test_a_unit_is_reduced_when_it_says_so_and_those_before_it_have_started(stage: int) -> None:
    def run(comm: Communicator) -> list[list[int]]:
        parallel, model, calls = make(comm, stage)
        seen = []
        sum(layer() for layer in model).backward()
        parallel.units["1"].reduce()
        seen.append(reduced(calls))
        parallel.units["2"].reduce()
        parallel.units["2"].reduce()
        seen.append(reduced(calls))
        parallel.reduce()
        parallel.wait()
        seen.append(reduced(calls))
        for piece in parallel.pieces.values():
            assert set(piece.parameter.grad.tolist()) == {2.0}
        return seen

    assert LocalWorld(2).run(run) == [[[], [8, 6], [8, 6, 4]]] * 2


@STAGES
def test_a_gradient_after_a_unit_was_reduced_is_refused(stage: int) -> None:
    def run(comm: Communicator) -> None:
        parallel, model, _ = make(comm, stage)
        model[2]().backward()
        parallel.units["2"].reduce()
        with pytest.raises(LifecycleError, match=r"second gradient of 2.weight arrived"):
            model[2]().backward()

    LocalWorld(2).run(run)


def end_in_backward(parallel: DataParallel, loss: torch.Tensor, *names: str) -> torch.Tensor:
    """Return a loss whose backward first says of units that they are over."""
    tensor = loss.clone()
    tensor.register_hook(lambda _: [parallel.units[name].end_backward() for name in names] and None)
    return tensor


@pytest.mark.parametrize("armed", [False, True])
def test_the_end_of_a_units_part_of_the_last_backward_starts_it_without_gradients(
    armed: bool,
) -> None:
    def run(comm: Communicator) -> list[list[int]]:
        parallel, model, calls = make(comm, 3)
        if armed:
            parallel.last_backward()
        used = [model[1], model[2]] if comm.rank == 0 else [model[1]]
        end_in_backward(parallel, sum(layer() for layer in used), "2", "1").backward()
        seen = [reduced(calls)]
        parallel.reduce()
        parallel.wait()
        seen.append(reduced(calls))
        gradients = {p.name: set(p.parameter.grad.tolist()) for p in parallel.pieces.values()}
        assert gradients == {"0.weight": {0.0}, "1.weight": {2.0}, "2.weight": {1.0}}
        return seen

    assert LocalWorld(2).run(run) == [[[8, 6] if armed else [], [8, 6, 4]]] * 2


def test_a_unit_does_not_end_in_a_backward_that_adds_to_no_gradient() -> None:
    def run(comm: Communicator) -> list[list[int]]:
        parallel, model, calls = make(comm, 3)
        parallel.last_backward()
        loss = end_in_backward(parallel, model[2]() * model[1](), "2", "1")
        torch.autograd.grad(loss, [model[2].weight], retain_graph=True)
        seen = [reduced(calls)]
        loss.backward()
        seen.append(reduced(calls))
        parallel.reduce()
        parallel.wait()
        assert set(parallel.pieces["2.weight"].parameter.grad.tolist()) == {2.0 * SIZES[1]}
        return seen

    assert LocalWorld(2).run(run) == [[[], [8, 6]]] * 2


@pytest.mark.parametrize("stage", [2, 3])
def test_the_last_backward_frees_the_gradients_of_older_units(stage: int) -> None:
    def run(comm: Communicator) -> list[bool]:
        model = nn.Sequential(*(Layer(size) for size in SIZES))
        policy = ShardPolicy(stage=stage, units=by_class(Layer), alignment=1)
        parallel = data_parallel(model, Mesh(comm, MeshShape(dp=comm.size)), policy)
        for _ in range(2):  # the first step learns the order
            parallel.zero_grad()
            parallel.last_backward()
            sum(layer() for layer in model).backward()
            is_open = [parallel.units[n].buckets[0].sums.is_open for n in ("2", "1", "0")]
            parallel.reduce()
            parallel.wait()
        return is_open

    assert LocalWorld(2).run(run) == [[False, False, True]] * 2


def test_a_gradient_that_is_kept_stays_what_it_was() -> None:
    def run(comm: Communicator) -> None:
        parallel, model, _ = make(comm, 2)
        kept = []
        for factor in (1, 2):
            parallel.zero_grad()
            sum(factor * layer() for layer in model).backward()
            kept.append(model[1].weight.grad)
            parallel.reduce()
            parallel.wait()
        assert [set(gradient.tolist()) for gradient in kept] == [{1.0}, {2.0}]

    LocalWorld(2).run(run)


def test_with_missing_gradients_as_errors_nothing_is_reduced_early() -> None:
    def run(comm: Communicator) -> list[int]:
        parallel, model, calls = make(comm, 2, missing_gradients="error")
        parallel.last_backward()
        sum(layer() for layer in model).backward()
        parallel.units["2"].reduce()
        early = len(calls)
        parallel.reduce()
        parallel.wait()
        return [early, len(calls)]

    assert LocalWorld(2).run(run) == [[0, 4]] * 2


class LateBucket:
    """A bucket whose sums come late, and that notes how long anybody waits for them."""

    def __init__(self, waits: list[float]) -> None:
        self.members: tuple[object, ...] = ()
        self.sums = self
        self.is_lent = True
        self.leaves_early = True
        self.meets_others = True
        self.is_complete = False
        self.is_late = True
        self.waits = waits
        self.pending = 0

    def is_collectable(self, within_s: float) -> bool:
        self.waits.append(within_s)
        return not self.is_late

    def start_reduction(self) -> None: ...

    def collect(self) -> None: ...

    def forget_gradients(self) -> None: ...


def test_after_waits_in_vain_backwards_wait_more_and_more_seldom_until_one_succeeds() -> None:
    waits: list[float] = []
    buckets = [LateBucket(waits), LateBucket(waits)]
    reducer = Reducer(buckets, patience_s=0.5)

    def backward(*, is_late: bool) -> bool:
        reducer.begin()
        reducer.arm()
        waits.clear()
        buckets[0].is_late = is_late
        reducer.complete(buckets)
        return 0.5 in waits

    assert [backward(is_late=True) for _ in range(12)] == [
        *(True, False),
        *(True, False, False),
        *(True, False, False, False, False),
        *(True, False),
    ]
    while not backward(is_late=False):
        pass
    assert backward(is_late=True)
    assert [backward(is_late=True) for _ in range(3)] == [False, True, False]


def test_a_backward_takes_part_in_older_reductions_without_waiting_for_them() -> None:
    waits: list[float] = []
    buckets = [LateBucket(waits) for _ in range(4)]
    for bucket in buckets:
        bucket.is_lent = False
    reducer = Reducer(buckets, patience_s=0.5)
    reducer.begin()

    asked = []
    for number, bucket in enumerate(buckets):
        bucket.is_late = number == 1
        reducer.complete([bucket])
        asked.append(len(waits))

    # The first once; the second, which is late, at each new one, and none behind it.
    assert asked == [0, 1, 2, 3]
    assert set(waits) == {0.0}
