"""Gradients accumulate, are reduced once and are never another step's or parameter's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import LifecycleError
from trainwright.sharding.data.testing import Scalars, finish, wrap

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])


def on_two_ranks(run: Callable[[Communicator], dict[str, float]]) -> dict[str, float]:
    """Return what the ranks' pieces hold together; where both hold one they must agree."""
    merged: dict[str, float] = {}
    for found in LocalWorld(2).run(run):
        for name, value in found.items():
            assert merged.setdefault(name, value) == value
    return merged


@STAGES
@DTYPES
@pytest.mark.parametrize("armed", [True, False])
def test_micro_batches_are_accumulated_first_and_reduced_once(
    stage: int, dtype: torch.dtype, armed: bool
) -> None:
    factors = [[1.0, 2.0, 4.0], [3.0, 2.0, 0.0]]

    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", dtype=dtype)
        parallel = wrap(model, comm, stage=stage)
        for microbatch, factor in enumerate(factors[comm.rank]):
            if armed and microbatch == 2:
                parallel.last_backward()
            (model.a * factor).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 12.0}


@STAGES
@pytest.mark.parametrize("armed", [True, False])
def test_a_parameter_used_only_in_an_earlier_micro_batch_is_reduced(
    stage: int, armed: bool
) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=stage)
        (model.a * (comm.rank + 1)).backward()
        if armed:
            parallel.last_backward()
        (model.b * (comm.rank + 1)).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 3.0, "b": 3.0}


@STAGES
def test_an_unused_parameter_beside_a_used_one_does_not_stop_its_reduction(stage: int) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=stage)
        parallel.last_backward()
        (model.a * (comm.rank + 1)).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 3.0, "b": 0.0}


@STAGES
def test_ranks_that_use_different_parameters_never_mix_them_up(stage: int) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b", "c")
        parallel = wrap(model, comm, stage=stage, bucket_bytes=1)
        parallel.last_backward()
        (getattr(model, "ab"[comm.rank]) * 5 + model.c).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 5.0, "b": 5.0, "c": 2.0}


@STAGES
def test_a_rank_without_any_backward_joins_with_zeros(stage: int) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=stage)
        if comm.rank == 0:
            (model.a * 2 + model.b * 3).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 2.0, "b": 3.0}


@STAGES
@DTYPES
def test_a_gradient_of_the_step_before_is_never_applied_again(
    stage: int, dtype: torch.dtype
) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b", dtype=dtype)
        parallel = wrap(model, comm, stage=stage)
        (model.a + model.b).backward()
        finish(parallel)
        parallel.zero_grad()
        (model.a * 2).backward()
        return finish(parallel)

    assert on_two_ranks(run) == {"a": 4.0, "b": 0.0}


@STAGES
@DTYPES
def test_a_parameter_first_used_in_a_later_micro_batch_starts_from_zero(
    stage: int, dtype: torch.dtype
) -> None:
    model = Scalars("a", "b", dtype=dtype)
    parallel = wrap(model, stage=stage)
    for _ in range(3):
        parallel.zero_grad()
        model.a.backward()
        (model.a + model.b).backward()
        assert finish(parallel) == {"a": 2.0, "b": 1.0}


@STAGES
def test_small_gradients_of_bfloat16_weights_are_not_lost_among_many(stage: int) -> None:
    model = Scalars("a", dtype=torch.bfloat16)
    parallel = wrap(model, stage=stage)

    model.a.backward()
    for _ in range(256):
        (model.a * 2**-9).backward()

    assert finish(parallel) == {"a": 1.5}


@STAGES
def test_small_updates_of_bfloat16_weights_add_up_in_the_masters(stage: int) -> None:
    model = Scalars("a", dtype=torch.bfloat16)
    with torch.no_grad():
        model.a.fill_(1.0)
    parallel = wrap(model, stage=stage)
    optimizer = torch.optim.SGD([parallel.pieces["a"].parameter], lr=6e-4)

    for _ in range(100):
        parallel.zero_grad()
        model.a.backward()
        finish(parallel)
        optimizer.step()
        parallel.publish()

    assert parallel.pieces["a"].parameter.item() == pytest.approx(0.94, abs=1e-5)
    assert model.a.item() == 0.94140625


@pytest.mark.parametrize("owner", ["optimizer", "module"])
@DTYPES
def test_setting_gradients_to_none_between_steps_changes_nothing(
    owner: str, dtype: torch.dtype
) -> None:
    model = Scalars("a", dtype=dtype)
    parallel = wrap(model)
    optimizer = torch.optim.SGD([piece.parameter for piece in parallel.pieces.values()], lr=0.0)

    for _ in range(2):
        for factor in (1.0, 2.0, 4.0):
            (model.a * factor).backward()
        assert finish(parallel) == {"a": 7.0}
        optimizer.zero_grad() if owner == "optimizer" else model.zero_grad()
        parallel.zero_grad()


@STAGES
@DTYPES
def test_what_the_modules_own_zero_grad_throws_away_stays_away(
    stage: int, dtype: torch.dtype
) -> None:
    model = Scalars("a", "b", dtype=dtype)
    parallel = wrap(model, stage=stage)

    (model.a * 8 + model.b * 8).backward()
    model.zero_grad()
    (model.a * 2).backward()

    assert finish(parallel) == {"a": 2.0, "b": 0.0}


@STAGES
def test_a_gradient_thrown_away_before_its_bucket_starts_is_not_reduced(stage: int) -> None:
    model = Scalars("a", "b")
    parallel = wrap(model, stage=stage, bucket_bytes=1)

    parallel.last_backward()
    model.a.backward()
    model.zero_grad()
    model.b.backward()  # completes the first bucket, and the second is complete already

    assert finish(parallel) == {"a": 0.0, "b": 1.0}


@STAGES
@DTYPES
def test_a_gradient_written_by_hand_is_what_is_reduced(stage: int, dtype: torch.dtype) -> None:
    model = Scalars("a", "b", dtype=dtype)
    parallel = wrap(model, stage=stage)

    model.a.backward()
    model.a.grad = torch.full((), 5.0, dtype=dtype)
    model.b.grad = torch.full((), 6.0, dtype=dtype)
    (model.a * 2).backward()

    assert finish(parallel) == {"a": 7.0, "b": 6.0}


def test_gradients_share_memory_with_their_bucket_after_each_reduction() -> None:
    model = Scalars("a", "b")
    parallel = wrap(model)

    storages = set()
    for _ in range(3):
        parallel.zero_grad()
        (model.a + model.b).backward()
        finish(parallel)
        storages |= {p.grad.untyped_storage().data_ptr() for p in model.parameters()}

    assert len(storages) == 1


@STAGES
def test_gradients_of_strided_views_keep_their_elements_in_place(stage: int) -> None:
    model = nn.Linear(3, 2, bias=False)
    parallel = wrap(model, stage=stage)
    factors = torch.arange(6.0).view(3, 2)

    (model.weight.t() * factors).sum().backward()
    parallel.reduce()
    parallel.wait()

    gradient = parallel.pieces["weight"].parameter.grad
    assert torch.equal(gradient.reshape(2, 3), factors.t())


def test_a_graph_through_the_gradients_leaves_plain_numbers_in_the_buffer() -> None:
    model = Scalars("a")
    with torch.no_grad():
        model.a.fill_(3.0)
    parallel = wrap(model)

    with pytest.warns(UserWarning, match="create_graph"):
        (model.a**2).backward(create_graph=True)

    assert finish(parallel) == {"a": 6.0}
    assert not model.a.grad.requires_grad


@STAGES
def test_recomputed_layers_give_the_gradients_of_kept_ones(stage: int) -> None:
    model = nn.Linear(2, 2)
    parallel = wrap(model, stage=stage)

    parallel.last_backward()
    checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum().backward()

    assert finish(parallel) == {"weight": 4.0, "bias": 2.0}


@STAGES
def test_weights_loaded_into_the_module_reach_the_masters(stage: int) -> None:
    def run(comm: Communicator) -> list[float]:
        model = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        parallel = wrap(model, comm, stage=stage)
        model.load_state_dict({"weight": torch.full((1, 3), 2.0)})
        parallel.load_masters()
        parallel.publish()
        parallel.await_weights()
        held = [model.weight, *(piece.parameter for piece in parallel.pieces.values())]
        return [value for tensor in held for value in tensor.flatten().tolist()]

    for values in LocalWorld(2).run(run):
        assert set(values) == {2.0}


@STAGES
def test_masters_set_by_a_checkpoint_reach_every_ranks_module(stage: int) -> None:
    def run(comm: Communicator) -> list[float]:
        model = nn.Linear(5, 1, bias=False, dtype=torch.bfloat16)
        parallel = wrap(model, comm, stage=stage)
        whole = torch.arange(5.0).view(1, 5)
        with torch.no_grad():
            for piece in parallel.pieces.values():
                piece.parameter.copy_(piece.spec.extract(whole).view(piece.parameter.shape))
        parallel.publish()
        parallel.await_weights()
        return model.weight.flatten().tolist()

    assert LocalWorld(3).run(run) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3


@STAGES
def test_weights_moved_out_of_the_buffer_are_told_and_can_be_brought_back(stage: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    parallel = wrap(model, stage=stage)
    model.weight.data = torch.full((1, 2), 7.0)
    with pytest.raises(LifecycleError, match="weight left the flat buffer"):
        parallel.reduce()

    parallel.load_masters()

    assert parallel.pieces["weight"].parameter.flatten().tolist() == [7.0, 7.0]
    assert finish(parallel) == {"weight": 0.0}


@STAGES
def test_a_step_dropped_on_purpose_leaves_no_gradient_and_no_last_backward(stage: int) -> None:
    model = Scalars("a", "b")
    parallel = wrap(model, stage=stage)

    parallel.last_backward()
    model.a.backward()
    parallel.zero_grad(discard=True)
    (model.a * 3 + model.b).backward()
    model.a.backward()

    assert finish(parallel) == {"a": 4.0, "b": 1.0}


def test_where_only_a_range_is_reduced_the_module_shows_no_gradient() -> None:
    model = Scalars("a")
    parallel = wrap(model, stage=1)

    model.a.backward()
    finish(parallel)

    assert model.a.grad is None
    assert parallel.pieces["a"].parameter.grad.item() == 1.0


@pytest.mark.parametrize(
    ("stage", "dtype"), [(1, torch.float32), (0, torch.bfloat16), (1, torch.bfloat16)]
)
def test_weights_edited_behind_the_masters_are_not_overwritten_in_silence(
    stage: int, dtype: torch.dtype
) -> None:
    model = Scalars("a", dtype=dtype)
    parallel = wrap(model, stage=stage)
    parallel.publish()
    with torch.no_grad():
        model.a.fill_(2.0)
    with pytest.raises(LifecycleError, match="weights of a were changed in place"):
        parallel.publish()

    parallel.load_masters()
    parallel.publish()

    assert model.a.item() == parallel.pieces["a"].parameter.item() == 2.0


def test_at_stage_zero_an_edit_of_full_precision_weights_is_an_edit_of_the_masters() -> None:
    model = Scalars("a")
    parallel = wrap(model)

    with torch.no_grad():
        model.a.fill_(2.0)
    parallel.publish()

    assert parallel.pieces["a"].parameter is model.a
    assert model.a.item() == 2.0


def test_sparse_gradients_are_refused_by_name() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    wrap(model)

    with pytest.raises(LifecycleError, match=r"weight has a torch.sparse_coo gradient"):
        model(torch.tensor([1])).sum().backward()


@STAGES
def test_a_step_that_is_skipped_leaves_weights_as_they_were(stage: int) -> None:
    def run(comm: Communicator) -> list[float]:
        model = nn.Linear(3, 1, bias=False)
        parallel = wrap(model, comm, stage=stage)
        before = model.weight.detach().clone()
        model(torch.full((1, 3), torch.inf)).sum().backward()
        finish(parallel)
        parallel.publish()
        parallel.await_weights()
        parallel.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        finish(parallel)
        assert torch.equal(model.weight, before)
        return [g for p in parallel.pieces.values() for g in p.parameter.grad.flatten().tolist()]

    for gradients in LocalWorld(2).run(run):
        assert set(gradients) == {2.0}
