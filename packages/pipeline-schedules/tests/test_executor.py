"""What the executor computes: the serial run's losses and gradients, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.pipeline_schedules import Kind, Schedule, gpipe, one_f_one_b, sequential
from trainwright.pipeline_schedules.execute import (
    BoundarySpec,
    PipelineExecutor,
    TensorSpec,
)
from trainwright.pipeline_schedules.execute.testing import serial_step

# Shapes: B rows of a microbatch, D width.

GENERATORS = (sequential, gpipe, one_f_one_b)
WIDTH = 3


class Layer(nn.Module):
    """One stage: the first embeds ``x``, the others shift what comes in by their own ``shift``."""

    def __init__(self, stage: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 * seed + stage)
        self.weight_DD = nn.Parameter(
            torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)
        )
        self.dropout = nn.Dropout(0.5)

    def forward(
        self,
        hidden_BD: torch.Tensor | None = None,
        *,
        x_BD: torch.Tensor | None = None,
        shift: float = 0.0,
    ) -> torch.Tensor:
        start_BD = hidden_BD if x_BD is None else x_BD
        assert start_BD is not None
        output_BD = torch.tanh(start_BD @ self.weight_DD + shift)
        return output_BD


def squares(output_BD: torch.Tensor, target_BD: torch.Tensor) -> torch.Tensor:
    return ((output_BD - target_BD) ** 2).sum()


class Data:
    """Inputs of a step: rows of each microbatch may differ."""

    def __init__(self, num_stages: int, rows: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(number, WIDTH) for number in rows]
        self.num_stages = num_stages
        self.x = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        self.target = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]

    def __call__(self, stage: int, microbatch: int) -> Mapping[str, Any]:
        values: dict[str, Any] = {"shift": 0.1 * stage - 0.2 * microbatch}
        if stage == 0:
            values["x_BD"] = self.x[microbatch]
        if stage == self.num_stages - 1:
            values["target_BD"] = self.target[microbatch]
        return values


Outcome = tuple[float, dict[int, torch.Tensor]]


def gradients_of(stages: Mapping[int, nn.Module]) -> dict[int, torch.Tensor]:
    return {s: p.grad.clone() for s, stage in stages.items() for p in stage.parameters()}


def pipeline_outcome(
    schedule: Schedule,
    use: Callable[[PipelineExecutor, Mapping[int, Layer]], float],
    *,
    world: LocalWorld | None = None,
    **options: Any,
) -> Outcome:
    """Run ``use`` on every rank; sum the losses and collect all gradients."""

    def on_rank(comm: Communicator) -> Outcome:
        stages = {s: Layer(s) for s in schedule.stages_of(comm.rank)}
        executor = PipelineExecutor(schedule, stages, comm, loss=squares, **options)
        return use(executor, stages), gradients_of(stages)

    world = world or LocalWorld(schedule.num_ranks, timeout_s=10.0)
    outcomes = world.run(on_rank)
    gradients = {s: g for _, by_stage in outcomes for s, g in by_stage.items()}
    return sum(loss for loss, _ in outcomes), gradients


def serial_outcome(data: Data, num_microbatches: int, **scale: float) -> Outcome:
    stages = [Layer(s) for s in range(data.num_stages)]
    loss = serial_step(stages, data, squares, num_microbatches, **scale)
    return float(loss), gradients_of(dict(enumerate(stages)))


def assert_equal(seen: Outcome, right: Outcome) -> None:
    # Both sides do the same operations in float64; only the order of at most seven additions
    # differs, so a few units in the last place of the largest term are allowed.
    assert seen[0] == pytest.approx(right[0], rel=1e-13)
    assert seen[1].keys() == right[1].keys()
    for stage, gradient in right[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(seen[1][stage], gradient, rtol=0.0, atol=1e-13 * scale + 1e-300)


def placed(rank_of_stage: Sequence[int], num_microbatches: int, *, all_first: bool) -> Schedule:
    """A schedule for any placement: microbatch after microbatch, or all forwards first."""
    num_stages = len(rank_of_stage)
    forward = [(Kind.F, s, m) for m in range(num_microbatches) for s in range(num_stages)]
    backward = [
        (Kind.B, s, m) for m in range(num_microbatches) for s in reversed(range(num_stages))
    ]
    order = forward + backward
    if not all_first:
        order = sorted(order, key=lambda row: row[2])
    ranks = range(max(rank_of_stage) + 1)
    actions = [np.array([r for r in order if rank_of_stage[r[1]] == q], np.int32) for q in ranks]
    return Schedule(actions, rank_of_stage, num_microbatches)


@settings(max_examples=25, deadline=None)
@given(
    generator=st.sampled_from(GENERATORS),
    ranks=st.integers(1, 5),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    buffered=st.booleans(),
    receive_ahead=st.booleans(),
    loss_scale=st.sampled_from([1.0, 1024.0]),
)
def test_every_schedule_computes_the_losses_and_gradients_of_the_serial_run(
    generator: Callable[[int, int], Schedule],
    ranks: int,
    rows: list[int],
    buffered: bool,
    receive_ahead: bool,
    loss_scale: float,
) -> None:
    data = Data(ranks, rows)
    world = LocalWorld(ranks, timeout_s=10.0, buffered_sends=buffered)
    schedule = generator(ranks, len(rows))

    def one_step(executor: PipelineExecutor, _: object) -> float:
        result = executor.step(data, divisor=7.0, loss_scale=loss_scale)
        assert result.loss_sum.dtype == torch.float64
        assert not result.loss_sum.requires_grad
        return float(result.loss_sum)

    seen = pipeline_outcome(schedule, one_step, world=world, receive_ahead=receive_ahead)

    right = serial_outcome(data, len(rows), divisor=7.0, loss_scale=loss_scale)
    assert_equal(seen, right)


@settings(max_examples=15, deadline=None)
@given(
    placement=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    rows=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    all_first=st.booleans(),
    buffered=st.booleans(),
    receive_ahead=st.booleans(),
)
def test_stages_may_lie_on_the_ranks_in_any_way(
    placement: list[int],
    rows: list[int],
    all_first: bool,
    buffered: bool,
    receive_ahead: bool,
) -> None:
    data = Data(len(placement), rows)
    schedule = placed(placement, len(rows), all_first=all_first)
    world = LocalWorld(schedule.num_ranks, timeout_s=10.0, buffered_sends=buffered)

    def step_and_evaluate(executor: PipelineExecutor, _: object) -> float:
        loss = float(executor.step(data, divisor=3.0).loss_sum)
        assert float(executor.evaluate(data, len(rows)).loss_sum) == loss
        return loss

    seen = pipeline_outcome(schedule, step_and_evaluate, world=world, receive_ahead=receive_ahead)

    assert_equal(seen, serial_outcome(data, len(rows), divisor=3.0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulating_over_steps_gives_the_gradient_of_one_large_step(ranks: int) -> None:
    data = Data(ranks, [2, 1, 3, 2])

    def two_steps(executor: PipelineExecutor, _: object) -> float:
        first = executor.step(data, divisor=8.0, reduce=False)
        second = executor.step(lambda s, m: data(s, m + 2), divisor=8.0)
        return float(first.loss_sum) + float(second.loss_sum)

    seen = pipeline_outcome(one_f_one_b(ranks, 2), two_steps)

    assert_equal(seen, serial_outcome(data, 4, divisor=8.0))


class Scale(nn.Module):
    """Multiplies by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, hidden: torch.Tensor | None = None, *, x: Any = None) -> torch.Tensor:
        start = hidden if x is None else x
        assert start is not None
        return start * self.w


def scale_gradients(
    ranks: int, microbatches: Sequence[torch.Tensor], divisor: Any, steps: int = 1
) -> list[float]:
    def on_rank(comm: Communicator) -> float:
        stage = Scale()
        executor = PipelineExecutor(
            one_f_one_b(ranks, len(microbatches)),
            {comm.rank: stage},
            comm,
            loss=lambda output, **_: output.sum(),
        )
        for _ in range(steps):
            executor.step(lambda s, m: {"x": microbatches[m]} if s == 0 else {}, divisor=divisor)
        assert stage.w.grad is not None
        return float(stage.w.grad)

    return LocalWorld(ranks, timeout_s=10.0).run(on_rank)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_several_steps_add_up_and_are_not_divided_again(ranks: int) -> None:
    ones = [torch.ones(1, dtype=torch.float64)] * 4

    gradients = scale_gradients(ranks, ones, divisor=2 * len(ones), steps=2)

    assert gradients == [1.0] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("divisor", [8, 8.0, torch.tensor(8), torch.tensor(8.0)])
def test_the_token_count_divides_gradients_once_with_and_without_a_pipeline(
    ranks: int, divisor: Any
) -> None:
    tokens = [torch.full((4,), 2.0, dtype=torch.float64)] * 2

    gradients = scale_gradients(ranks, tokens, divisor)

    assert gradients == [2.0] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_uneven_microbatches_weigh_by_their_rows(ranks: int) -> None:
    x = torch.arange(1.0, 9.0, dtype=torch.float64)

    gradients = scale_gradients(ranks, x.split(3), divisor=8)

    assert gradients == [4.5] * ranks


@pytest.mark.parametrize("divisor", [0, torch.tensor(0)])
def test_a_batch_without_valid_tokens_has_zero_gradients(divisor: Any) -> None:
    gradients = scale_gradients(2, [torch.ones(2, dtype=torch.float64)], divisor)

    assert gradients == [0.0, 0.0]


def test_lengths_may_change_with_every_microbatch_and_between_training_and_evaluation() -> None:
    lengths = {"train": [3, 5, 2], "eval": [7], "again": [4, 1, 6]}
    received: list[int] = []

    class Positions(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            expected = torch.arange(len(hidden), dtype=torch.float64)
            assert torch.equal(hidden.detach(), expected)
            received.append(len(hidden))
            return hidden

    def on_rank(comm: Communicator) -> None:
        stage = Scale() if comm.rank == 0 else Positions()
        executor = PipelineExecutor(
            one_f_one_b(2, 3), {comm.rank: stage}, comm, loss=lambda output: output.sum()
        )

        def inputs(name: str) -> Callable[[int, int], Mapping[str, Any]]:
            x = [torch.arange(n, dtype=torch.float64) for n in lengths[name]]
            return lambda s, m: {"x": x[m]} if s == 0 else {}

        executor.step(inputs("train"), divisor=1.0)
        executor.evaluate(inputs("eval"), 1)
        executor.step(inputs("again"), divisor=1.0)

    LocalWorld(2, timeout_s=10.0).run(on_rank)

    assert received == [3, 5, 2, 7, 4, 1, 6]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("evaluations", [(0, 1), (1, 0), (2, 2)])
def test_evaluation_before_and_between_steps_disturbs_nothing(
    ranks: int, evaluations: tuple[int, int]
) -> None:
    data = Data(ranks, [2, 1, 3])
    other = Data(ranks, [1, 4, 2, 2, 1], seed=5)

    def mixed(executor: PipelineExecutor, own: Mapping[int, Layer]) -> float:
        stages = own.values()
        for stage in stages:
            stage.dropout.eval()
        modes = [m.training for stage in stages for m in stage.modules()]
        for _ in range(evaluations[0]):
            executor.evaluate(other, 5)
        loss = float(executor.step(data, divisor=4.0).loss_sum)
        gradients = [p.grad.clone() for stage in stages for p in stage.parameters()]
        for _ in range(evaluations[1]):
            executor.evaluate(other, 5)
        after = [p.grad for stage in stages for p in stage.parameters()]
        assert all(map(torch.equal, gradients, after))
        assert modes == [m.training for stage in stages for m in stage.modules()]
        return loss

    assert_equal(
        pipeline_outcome(one_f_one_b(ranks, 3), mixed), serial_outcome(data, 3, divisor=4.0)
    )


@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_evaluation_takes_any_number_of_microbatches_in_evaluation_mode(
    num_microbatches: int,
) -> None:
    data = Data(3, range(1, num_microbatches + 1))
    modes = []

    class Watch(Layer):
        def forward(self, *arguments: Any, **inputs: Any) -> torch.Tensor:
            modes.append(self.training or self.dropout.training or torch.is_grad_enabled())
            inputs.pop("target_BD", None)
            return super().forward(*arguments, **inputs)

    def on_rank(comm: Communicator) -> float:
        executor = PipelineExecutor(gpipe(3, 4), {comm.rank: Watch(comm.rank)}, comm, loss=squares)
        return float(executor.evaluate(data, num_microbatches).loss_sum)

    losses = LocalWorld(3, timeout_s=10.0).run(on_rank)

    right, _ = serial_outcome(data, num_microbatches, divisor=1.0)
    assert losses == [0.0, 0.0, pytest.approx(right, rel=1e-13)]
    assert modes == [False] * 3 * num_microbatches


def test_declared_shapes_need_no_header_and_give_the_same_gradients() -> None:
    data = Data(3, [2, 2, 2, 2])
    boundary = BoundarySpec.uniform(3, TensorSpec((2, WIDTH), torch.float64))

    def one_step(executor: PipelineExecutor, _: object) -> float:
        return float(executor.step(data, divisor=5.0).loss_sum)

    seen = pipeline_outcome(one_f_one_b(3, 4), one_step, boundary=boundary)

    assert_equal(seen, serial_outcome(data, 4, divisor=5.0))


def test_one_rank_does_bit_for_bit_what_a_plain_loop_does() -> None:
    data = Data(1, [2, 3, 1])
    plain, piped = Layer(0), Layer(0)
    executor = PipelineExecutor(sequential(1, 3), {0: piped}, SingleCommunicator(), loss=squares)

    for microbatch in range(3):
        inputs = dict(data(0, microbatch))
        target_BD = inputs.pop("target_BD")
        (squares(plain(**inputs), target_BD) * (1 / 6)).backward()
    executor.step(data, divisor=6)

    assert plain.weight_DD.grad is not None
    assert piped.weight_DD.grad is not None
    assert torch.equal(plain.weight_DD.grad, piped.weight_DD.grad)


def test_the_loss_sum_is_accumulated_in_float64() -> None:
    values = torch.tensor([2.0**24, 1.0, 1.0], dtype=torch.float32)
    executor = PipelineExecutor(
        sequential(1, 3),
        {0: nn.Identity()},
        SingleCommunicator(),
        loss=lambda output: output,
    )

    result = executor.step(lambda s, m: {"input": values[m]}, divisor=1.0)

    assert float(result.loss_sum) == 2.0**24 + 2.0


def test_a_stage_without_parameters_passes_gradients_on() -> None:
    data = Data(3, [2, 1])

    def on_rank(comm: Communicator) -> torch.Tensor | None:
        stage = nn.Identity() if comm.rank == 2 else Layer(comm.rank)
        executor = PipelineExecutor(one_f_one_b(3, 2), {comm.rank: stage}, comm, loss=squares)

        def inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
            values = dict(data(stage, microbatch))
            if stage == 2:
                del values["shift"]
            return values

        executor.step(inputs, divisor=1.0)
        return None if comm.rank == 2 else stage.weight_DD.grad

    first, second, _ = LocalWorld(3, timeout_s=10.0).run(on_rank)

    stages = [Layer(0), Layer(1)]
    two = Data(2, [2, 1])
    serial_step(stages, two, squares, 2, divisor=1.0)
    torch.testing.assert_close(first, stages[0].weight_DD.grad)
    torch.testing.assert_close(second, stages[1].weight_DD.grad)


def test_frozen_first_stages_are_skipped_in_backward() -> None:
    data = Data(3, [2, 1])

    def on_rank(comm: Communicator) -> torch.Tensor | None:
        stage = Layer(comm.rank)
        stage.requires_grad_(comm.rank == 2)
        executor = PipelineExecutor(one_f_one_b(3, 2), {comm.rank: stage}, comm, loss=squares)
        executor.step(data, divisor=1.0)
        return stage.weight_DD.grad

    gradients = LocalWorld(3, timeout_s=10.0).run(on_rank)

    _, right = serial_outcome(data, 2, divisor=1.0)
    assert gradients[:2] == [None, None]
    torch.testing.assert_close(gradients[2], right[2])


def test_recomputed_layers_give_the_same_gradients() -> None:
    data = Data(2, [2, 1, 3])

    class Recomputed(Layer):
        def forward(self, *boundary: torch.Tensor, **inputs: Any) -> torch.Tensor:
            inputs.pop("target_BD", None)
            run = super().forward
            output: torch.Tensor = checkpoint(run, *boundary, use_reentrant=False, **inputs)
            return output

    def on_rank(comm: Communicator) -> torch.Tensor | None:
        stage = Recomputed(comm.rank)
        executor = PipelineExecutor(one_f_one_b(2, 3), {comm.rank: stage}, comm, loss=squares)
        executor.step(data, divisor=4.0)
        return stage.weight_DD.grad

    gradients = LocalWorld(2, timeout_s=10.0).run(on_rank)

    _, right = serial_outcome(data, 3, divisor=4.0)
    torch.testing.assert_close(dict(enumerate(gradients)), right, rtol=1e-13, atol=1e-13)
