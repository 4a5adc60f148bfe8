"""Parameters without a gradient: zeros, or an error that names them and the ranks."""

from __future__ import annotations

import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.sharding.data import LifecycleError
from trainwright.sharding.data.testing import (
    RecordedCall,
    RecordingCommunicator,
    Scalars,
    finish,
    wrap,
)

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@STAGES
@pytest.mark.parametrize("armed", [True, False])
def test_a_missing_gradient_is_an_error_on_every_rank_that_names_parameters_and_ranks(
    stage: int, armed: bool
) -> None:
    def run(comm: Communicator) -> tuple[str, list[str]]:
        calls: list[RecordedCall] = []
        model = Scalars("a", "b", "c", "d")
        parallel = wrap(
            model, RecordingCommunicator(comm, calls), stage=stage, missing_gradients="error"
        )
        calls.clear()
        if armed:
            parallel.last_backward()
        (
            model.a + (model.b if comm.rank == 0 else 0) + (model.c if comm.rank < 2 else 0)
        ).backward()
        with pytest.raises(LifecycleError) as raised:
            parallel.reduce()
        return str(raised.value), [c.operation for c in calls if c.operation == "reduce_scatter"]

    for message, reductions in LocalWorld(3).run(run):
        assert "d (on every rank)" in message
        assert "c (on rank 2)" in message
        assert "b (on ranks 1, 2)" in message
        assert "a (" not in message
        assert reductions == []


@STAGES
def test_after_the_error_the_step_can_be_dropped_and_another_one_taken(stage: int) -> None:
    def run(comm: Communicator) -> dict[str, float]:
        model = Scalars("a", "b")
        parallel = wrap(model, comm, stage=stage, missing_gradients="error")
        model.a.backward()
        with pytest.raises(LifecycleError, match="no gradient in this step for b"):
            parallel.reduce()
        parallel.zero_grad(discard=True)
        (model.a * 2 + model.b * 3).backward()
        return finish(parallel)

    merged: dict[str, float] = {}
    for found in LocalWorld(2).run(run):
        merged.update(found)
    assert merged == {"a": 4.0, "b": 6.0}


def test_many_missing_gradients_are_counted() -> None:
    names = [f"p{index}" for index in range(9)]
    parallel = wrap(Scalars(*names), missing_gradients="error")

    with pytest.raises(LifecycleError, match=r"and 4 more\. Use every parameter"):
        parallel.reduce()


@STAGES
def test_a_gradient_used_in_any_micro_batch_is_not_missing(stage: int) -> None:
    model = Scalars("a", "b", dtype=torch.float32)
    parallel = wrap(model, stage=stage, missing_gradients="error")

    model.a.backward()
    model.b.backward()

    assert finish(parallel) == {"a": 1.0, "b": 1.0}
