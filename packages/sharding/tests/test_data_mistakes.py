"""Calls out of order, and parameters changed from outside: each is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from trainwright.sharding.data import DataParallel, LifecycleError
from trainwright.sharding.data.testing import Scalars, finish, wrap

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])


def backward_after_reduce(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    parallel.reduce()
    model.a.backward()


def backward_after_wait(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    finish(parallel)
    model.a.backward()


def only_the_optimizers_zero_grad(model: Scalars, parallel: DataParallel) -> None:
    optimizer = torch.optim.SGD([p.parameter for p in parallel.pieces.values()])
    model.a.backward()
    finish(parallel)
    optimizer.step()
    optimizer.zero_grad()
    model.a.backward()


def last_backward_after_wait(model: Scalars, parallel: DataParallel) -> None:
    finish(parallel)
    parallel.last_backward()


def two_backwards_after_last_backward(model: Scalars, parallel: DataParallel) -> None:
    parallel.last_backward()
    (model.a + model.b).backward()
    model.a.backward()


def wait_without_reduce(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    parallel.wait()


def zero_grad_in_flight(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    parallel.reduce()
    parallel.zero_grad()


def zero_grad_half_in_flight(model: Scalars, parallel: DataParallel) -> None:
    parallel.last_backward()
    model.b.backward()
    if len(parallel.layout[0].buckets) == 1:  # stage 3, where half a bucket does not start
        model.a.backward()
    parallel.zero_grad()


def zero_grad_instead_of_reduce(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    parallel.zero_grad()


def publish_in_flight(model: Scalars, parallel: DataParallel) -> None:
    parallel.reduce()
    parallel.publish()


def publish_without_reduce(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    parallel.publish()


def load_masters_in_flight(model: Scalars, parallel: DataParallel) -> None:
    parallel.reduce()
    parallel.load_masters()


def gradients_set_to_none_in_flight(model: Scalars, parallel: DataParallel) -> None:
    model.a.backward()
    parallel.reduce()
    model.zero_grad()
    parallel.wait()


def parameter_replaced(model: Scalars, parallel: DataParallel) -> None:
    model.load_state_dict({"b": torch.ones(())}, strict=False, assign=True)
    parallel.reduce()


def parameter_frozen_later(model: Scalars, parallel: DataParallel) -> None:
    model.b.requires_grad_(False)
    parallel.reduce()


def parameter_unfrozen_later(model: Scalars, parallel: DataParallel) -> None:
    model.fixed.requires_grad_(True)
    parallel.reduce()


def parameter_added_later(model: Scalars, parallel: DataParallel) -> None:
    model.late = nn.Parameter(torch.ones(1))
    parallel.reduce()


def model_converted_later(model: Scalars, parallel: DataParallel) -> None:
    model.half()
    parallel.load_masters()


MISTAKES = [
    (backward_after_reduce, "gradient of a arrived: backward after reduce.. without zero_grad"),
    (backward_after_wait, "gradient of a arrived: backward after reduce.. without zero_grad"),
    (only_the_optimizers_zero_grad, "without zero_grad.*an optimizer's reaches only its pieces"),
    (last_backward_after_wait, "last_backward.. after reduce.. without zero_grad"),
    (two_backwards_after_last_backward, "second gradient of a arrived after its reduction"),
    (wait_without_reduce, "wait.. before reduce"),
    (zero_grad_in_flight, "zero_grad.. while gradients are being reduced"),
    (zero_grad_half_in_flight, "zero_grad.. while gradients are being reduced"),
    (zero_grad_instead_of_reduce, "would drop gradients that were accumulated but not reduced"),
    (publish_in_flight, "publish.. while gradients are being reduced"),
    (publish_without_reduce, "publish.. with gradients that were not reduced"),
    (load_masters_in_flight, "load_masters.. while gradients are being reduced"),
    (gradients_set_to_none_in_flight, "gradient of b was replaced or set to None between"),
    (parameter_replaced, "b was replaced by another parameter"),
    (parameter_frozen_later, "b was frozen after data_parallel"),
    (parameter_unfrozen_later, "fixed was frozen when data_parallel.. was called"),
    (parameter_added_later, "late was added after data_parallel"),
    (model_converted_later, "(b|fixed) is now .* torch.float16 .* convert or move a model before"),
]


@STAGES
@DTYPES
@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_call_out_of_order_is_refused(
    mistake: Callable[[Scalars, DataParallel], None],
    message: str,
    stage: int,
    dtype: torch.dtype,
) -> None:
    model = Scalars("a", "b", dtype=dtype)
    model.fixed = nn.Parameter(torch.ones(1), requires_grad=False)
    parallel = wrap(model, stage=stage, bucket_bytes=1)

    with pytest.raises(LifecycleError, match=message):
        mistake(model, parallel)


def test_a_parameter_that_gets_gradients_twice_does_not_complete_its_neighbours() -> None:
    model = Scalars("a", "b")
    parallel = wrap(model)

    parallel.last_backward()
    model.a.backward()  # as re-entrant checkpointing does, in backwards within a backward
    model.a.backward()
    model.b.backward()

    assert finish(parallel) == {"a": 2.0, "b": 1.0}
