"""One scale and one verdict for all losses, optimizers, scalers and parts of a gradient."""

import math

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.collectives import LocalWorld, ReduceOp
from trainwright.precision import DynamicLossScaler, PrecisionError, ScalerOrderError
from trainwright.precision.testing import CountingCommunicator


def sgd(weight):
    return torch.optim.SGD([weight], lr=1.0)


def test_the_first_and_the_last_loss_of_an_iteration_get_one_scale():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = sgd(weight)
    scaler = DynamicLossScaler(8.0, growth_interval=1)
    for auxiliary in (1.0, 2.0, 3.0):
        scaler.scale(weight.sum()).backward()
        scaler.scale(auxiliary * weight.sum()).backward()

    assert weight.grad.item() == 8.0 * (3 + 1 + 2 + 3)
    assert scaler.step(optimizer)
    assert weight.item() == -9.0


@pytest.mark.parametrize("new_scale", [None, 16.0])
def test_an_update_between_micro_batches_is_refused_and_moves_no_scale(new_scale):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = sgd(weight)
    scaler = DynamicLossScaler(8.0, growth_interval=1)
    scaler.scale(weight.sum()).backward()

    with pytest.raises(ScalerOrderError, match="still hold the old scale"):
        scaler.update(new_scale)

    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update(new_scale)
    assert weight.item() == -2.0
    assert scaler.get_scale() == 16.0


def test_scalers_of_several_sub_models_move_together_by_one_shared_count():
    def train(communicator):
        weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizers = [sgd(weight) for weight in weights]
        scalers = [DynamicLossScaler(8.0, growth_interval=2) for _ in weights]
        seen = []
        for step in range(4):
            for number, (weight, scaler) in enumerate(zip(weights, scalers, strict=True)):
                weight.grad = None
                bad = step == 0 and number == 1 and communicator.rank == 0
                scaler.scale((weight * (math.inf if bad else 1.0)).sum()).backward()
            count = torch.stack([(~weight.grad.isfinite()).sum() for weight in weights]).sum()
            communicator.all_reduce(count, ReduceOp.SUM).wait()
            for optimizer, scaler in zip(optimizers, scalers, strict=True):
                scaler.unscale_(optimizer, non_finite=count)
            verdicts = [s.step(o) for s, o in zip(scalers, optimizers, strict=True)]
            for scaler in scalers:
                scaler.update()
            seen.append((verdicts, [(s.get_scale(), s.state_dict()) for s in scalers]))
        return seen

    first, second = LocalWorld(2).run(train)

    assert first == second
    assert [verdicts for verdicts, _ in first] == [[False] * 2, *[[True] * 2] * 3]
    assert [[scale for scale, _ in states] for _, states in first] == [
        [4.0, 4.0],
        [4.0, 4.0],
        [8.0, 8.0],
        [8.0, 8.0],
    ]
    assert all(states[0] == states[1] for _, states in first)


@pytest.fixture
def mesh():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        distributed.destroy_process_group()


def distributed_weight(mesh, gradient, placement=None):
    placements = [placement or Shard(0)]
    whole = [placements[0] if not placements[0].is_partial() else Replicate()]
    weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, whole))
    weight.grad = DTensor.from_local(torch.full((2, 3), gradient), mesh, placements)
    return weight


def test_the_local_part_of_a_distributed_gradient_is_unscaled_in_place(mesh):
    communicator = CountingCommunicator()
    weight = distributed_weight(mesh, 24.0)
    scaler = DynamicLossScaler(8.0, communicator=communicator)

    optimizer = sgd(weight)
    scaler.unscale_(optimizer)

    assert isinstance(weight.grad, DTensor)
    assert torch.equal(weight.grad.to_local(), torch.full((2, 3), 3.0))
    assert scaler.step(optimizer)
    assert communicator.num_all_reduces == 1


def test_an_overflow_in_the_local_part_skips_the_step(mesh):
    weight = distributed_weight(mesh, math.inf)
    optimizer = sgd(weight)
    scaler = DynamicLossScaler(1.0, communicator=CountingCommunicator())

    assert not scaler.step(optimizer)

    assert torch.equal(weight.to_local(), torch.ones(2, 3))
    with pytest.raises(ArithmeticError, match=r"parameter 0 of group 0, shape \(4, 3\)"):
        scaler.update()


def test_a_distributed_gradient_asks_for_the_ranks_that_hold_its_other_parts(mesh):
    weight = distributed_weight(mesh, 24.0)
    optimizer = sgd(weight)

    with pytest.raises(PrecisionError, match=r"over 2 ranks.*communicator="):
        DynamicLossScaler(8.0).unscale_(optimizer)
    assert torch.equal(weight.grad.to_local(), torch.full((2, 3), 24.0))

    DynamicLossScaler(8.0).unscale_(optimizer, non_finite=0)
    assert torch.equal(weight.grad.to_local(), torch.full((2, 3), 3.0))


def test_a_replicated_gradient_is_decided_by_each_rank_alike(mesh):
    weight = distributed_weight(mesh, 24.0, Replicate())

    DynamicLossScaler(8.0).unscale_(sgd(weight))

    assert torch.equal(weight.grad.to_local(), torch.full((2, 3), 3.0))


def test_a_gradient_that_is_not_summed_yet_is_refused(mesh):
    weight = distributed_weight(mesh, 24.0, Partial())
    scaler = DynamicLossScaler(8.0, communicator=CountingCommunicator())

    with pytest.raises(PrecisionError, match="infinite sum"):
        scaler.unscale_(sgd(weight))

    assert torch.equal(weight.grad.to_local(), torch.full((2, 3), 24.0))
