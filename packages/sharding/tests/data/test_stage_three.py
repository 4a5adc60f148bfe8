"""Weights that are whole only while they are needed."""

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
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator
from trainwright.sharding.mesh import Mesh, MeshShape


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return model.to(dtype)


def cut(comm: Communicator, model: nn.Module, **policy: object) -> DataParallel:
    mesh = Mesh(comm, MeshShape(dp=comm.size))
    chosen = ShardPolicy(**{"stage": 3, "units": by_class(nn.Linear), "alignment": 1, **policy})
    return data_parallel(model, mesh, chosen, hooks=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_released_weights_are_nan_of_their_shape_and_gathered_ones_are_right(
    dtype: torch.dtype,
) -> None:
    plain = [parameter.detach() for parameter in make_model(dtype).parameters()]

    def run(comm: Communicator) -> None:
        model = make_model(dtype)
        parallel = cut(comm, model)
        for _ in range(2):
            for parameter, whole in zip(model.parameters(), plain, strict=True):
                assert (parameter.shape, parameter.dtype) == (whole.shape, whole.dtype)
                assert parameter.isnan().all()
            parallel.gather()
            parallel.gather()
            parallel.await_weights()
            assert all(unit.is_gathered for unit in parallel.units.values())
            for parameter, whole in zip(model.parameters(), plain, strict=True):
                assert torch.equal(parameter, whole)
            parallel.release()
            parallel.release()
            assert not any(unit.is_gathered for unit in parallel.units.values())

    LocalWorld(3).run(run)


def test_a_gather_that_nobody_waited_for_can_be_released() -> None:
    def run(comm: Communicator) -> bool:
        model = make_model()
        parallel = cut(comm, model)
        parallel.gather()
        parallel.release()
        hidden = all(bool(parameter.isnan().all()) for parameter in model.parameters())
        parallel.await_weights()
        return hidden and not any(bool(p.isnan().any()) for p in model.parameters())

    assert LocalWorld(2).run(run) == [True] * 2


def test_gathering_and_releasing_leave_version_counters_and_saved_tensors_alone() -> None:
    def run(comm: Communicator) -> list[torch.Tensor]:
        model = make_model()
        parallel = cut(comm, model)
        parallel.await_weights()
        versions = [parameter._version for parameter in model.parameters()]
        inputs = torch.ones(2, 3, requires_grad=True)
        loss = model(inputs).square().sum()
        parallel.release()
        parallel.await_weights()
        # Autograd saved transposed views of the weights, which are in the same storage again.
        loss.backward()
        assert versions == [parameter._version for parameter in model.parameters()]
        parallel.release()
        assert inputs.grad is not None
        return [inputs.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    model = make_model()
    inputs = torch.ones(2, 3, requires_grad=True)
    model(inputs).square().sum().backward()
    expected = [inputs.grad, *(parameter.grad for parameter in model.parameters())]

    for found in LocalWorld(2).run(run):
        for mine, serial in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, serial, rtol=0, atol=1e-6)


def test_a_unit_gathers_only_its_own_weights() -> None:
    def run(comm: Communicator) -> tuple[list[bool], list[tuple[str, int]]]:
        calls: list[RecordedCall] = []
        model = make_model()
        parallel = cut(RecordingCommunicator(comm, calls), model)
        calls.clear()
        parallel.units["2"].await_weights()
        hidden = [bool(parameter.isnan().any()) for parameter in model.parameters()]
        return hidden, [(call.operation, call.numel) for call in calls]

    assert LocalWorld(2).run(run) == [([True, True, False, False, True], [("all_gather", 24)])] * 2


def test_gathers_and_reductions_have_communicators_of_their_own() -> None:
    def run(comm: Communicator) -> dict[str, set[str]]:
        calls: list[RecordedCall] = []
        model = make_model()
        parallel = cut(RecordingCommunicator(comm, calls), model)
        calls.clear()
        parallel.await_weights()
        model(torch.ones(1, 3)).sum().backward()
        parallel.reduce()
        parallel.wait()
        return {
            operation: {call.communicator for call in calls if call.operation == operation}
            for operation in ("all_gather", "reduce_scatter")
        }

    for used in LocalWorld(2).run(run):
        # One for all units, so that their order is one; else a gather could meet a reduction.
        assert len(used["all_gather"]) == len(used["reduce_scatter"]) == 1
        assert used["all_gather"] != used["reduce_scatter"]


def test_writing_to_released_weights_is_refused() -> None:
    def run(comm: Communicator) -> None:
        model = make_model()
        cut(comm, model)
        with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
            model[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="single memory location"):
            model.load_state_dict(make_model().state_dict())

    LocalWorld(2).run(run)


def test_weights_changed_while_gathered_are_told_at_publish_and_can_be_loaded() -> None:
    def run(comm: Communicator) -> list[float]:
        model = make_model()
        parallel = cut(comm, model)
        parallel.await_weights()
        with torch.no_grad():
            model[2].bias.fill_(7)
        with pytest.raises(LifecycleError, match=r"2.bias were changed in place"):
            parallel.publish()
        parallel.load_masters()
        parallel.publish()
        parallel.await_weights()
        return model[2].bias.tolist()

    assert LocalWorld(3).run(run) == [[7.0] * 4] * 3


def test_a_single_element_written_while_released_is_told_and_not_lost() -> None:
    def run(comm: Communicator) -> float:
        model = make_model()
        model.register_parameter("scale", nn.Parameter(torch.ones(())))
        parallel = cut(comm, model)
        model.load_state_dict({"scale": torch.tensor(3.0)}, strict=False)
        for call in (parallel.publish, parallel.load_masters):
            with pytest.raises(LifecycleError, match="scale were changed"):
                call()
        parallel.await_weights()
        model.load_state_dict({"scale": torch.tensor(3.0)}, strict=False)
        parallel.load_masters()
        parallel.publish()
        parallel.await_weights()
        return model.get_parameter("scale").item()

    assert LocalWorld(2).run(run) == [3.0, 3.0]


def test_weights_that_left_the_buffer_are_not_lost_at_release() -> None:
    def run(comm: Communicator) -> list[float]:
        model = make_model()
        parallel = cut(comm, model)
        parallel.await_weights()
        model[2].bias.data = torch.full((4,), 5.0)
        with pytest.raises(LifecycleError, match=r"2.bias left the flat buffer"):
            parallel.release()
        parallel.load_masters()
        parallel.release()
        parallel.await_weights()
        return model[2].bias.tolist()

    assert LocalWorld(2).run(run) == [[5.0] * 4] * 2


def test_publishing_sends_nothing_and_the_next_gather_sees_the_new_weights() -> None:
    def run(comm: Communicator) -> tuple[int, list[float]]:
        calls: list[RecordedCall] = []
        model = make_model(torch.bfloat16)
        parallel = cut(RecordingCommunicator(comm, calls), model)
        parallel.await_weights()
        with torch.no_grad():
            for piece in parallel.pieces.values():
                piece.parameter.fill_(3)
        calls.clear()
        parallel.publish()
        sent = len(calls)
        assert all(bool(parameter.isnan().all()) for parameter in model.parameters())
        parallel.await_weights()
        return sent, sorted({v for p in model.parameters() for v in p.flatten().tolist()})

    assert LocalWorld(2).run(run) == [(0, [3.0])] * 2


def test_frozen_parameters_are_cut_too_whatever_their_dtype() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.table = nn.Parameter(torch.arange(-3, 4, dtype=torch.int8), requires_grad=False)
        model.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        model.small = nn.Parameter(torch.ones(5).to(torch.float8_e4m3fn), requires_grad=False)
        model.base = nn.Parameter(torch.arange(6.0).view(3, 2).t(), requires_grad=False)
        model.trained = nn.Parameter(torch.ones(2))
        return model

    def run(comm: Communicator) -> dict[str, int]:
        model = make()
        parallel = cut(comm, model)
        held = {name: piece.parameter.numel() for name, piece in parallel.frozen.items()}
        assert not any(piece.parameter.requires_grad for piece in parallel.frozen.values())
        assert model.base.isnan().all()
        assert model.table.tolist() == [-128] * 7
        plain = dict(make().named_parameters())
        for name, piece in parallel.frozen.items():
            bits = piece.spec.extract(plain[name].detach().view(plain[name].shape))
            assert torch.equal(piece.parameter.view(-1).float(), bits.reshape(-1).float())
        parallel.await_weights()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.float(), plain[name].float())
        (model.trained.sum() * 2).backward()
        parallel.reduce()
        parallel.wait()
        parallel.publish()
        return held

    held = LocalWorld(2).run(run)

    for name, parameter in make().named_parameters():
        if not parameter.requires_grad:
            assert sum(found.get(name, 0) for found in held) == parameter.numel()


def test_a_frozen_parameter_that_is_trained_later_is_told() -> None:
    def run(comm: Communicator) -> None:
        model = make_model()
        model[0].requires_grad_(False)
        parallel = cut(comm, model)
        model[0].bias.requires_grad_(True)
        with pytest.raises(LifecycleError, match=r"0.bias was frozen when data_parallel"):
            parallel.reduce()

    LocalWorld(2).run(run)


def test_a_bucket_that_one_rank_keeps_alone_stays_whole() -> None:
    model = make_model()
    mesh = Mesh(LocalWorld(1).run(lambda comm: comm)[0], MeshShape())
    parallel = data_parallel(model, mesh, ShardPolicy(stage=3, units=by_class(nn.Linear)))

    parallel.release()

    assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())
    assert all(unit.is_gathered for unit in parallel.units.values())
