"""Sharded weights in the executor: whole when they are read, and NaN at any other time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.pipeline_schedules import (
    Schedule,
    WeightPlan,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    peak_live,
    sequential,
    weight_traffic,
)
from trainwright.pipeline_schedules.execute import PipelineError, PipelineExecutor, WeightKeeper
from trainwright.pipeline_schedules.execute.program import forward_schedule
from trainwright.pipeline_schedules.execute.testing import serial_step
from trainwright.pipeline_schedules.testing import from_text, weight_plans

F64 = torch.float64
DIVISOR = 7.0

LOOPED = """
0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1
1F0 3F0 3B0 1F1 3F1 3B1 1B0 1B1
"""
FOLDED = """
0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1
1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""
ALONE = "0F0 1F0 2F0 2B0 0F1 1F1 2F1 2B1 1B0 1B1 0B0 0B1"

SCHEDULES = st.one_of(
    st.builds(sequential, st.integers(1, 3), st.integers(1, 3)),
    st.builds(gpipe, st.integers(1, 3), st.integers(1, 4)),
    st.builds(one_f_one_b, st.integers(1, 4), st.integers(1, 5)),
    st.just(from_text(LOOPED, [0, 1, 0, 1], 2)),
    st.just(from_text(FOLDED, [0, 1, 1, 0], 2)),
    st.just(from_text(ALONE, [0, 0, 0], 2)),
)


class Layer(nn.Module):
    """Two products and a parameter that odd microbatches do not use."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        shapes = ((3, 3), (3, 3), (3,))
        self.first, self.second, self.extra = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=F64)) for shape in shapes
        )

    def forward(self, hidden: torch.Tensor, microbatch: int) -> torch.Tensor:
        output = torch.tanh(hidden @ self.first) @ self.second
        return output if microbatch % 2 else output + self.extra


def squares(output: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()


def inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
    first = {"hidden": torch.full((2, 3), 0.1 + microbatch, dtype=F64)} if stage == 0 else {}
    return {**first, "microbatch": microbatch}


class Keeper:
    """Keeps the weights of some modules elsewhere, and NaN in them while they are not whole."""

    def __init__(self, *modules: nn.Module) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        self.kept = [p.detach().clone() for p in self.parameters]
        self.events: list[str] = []
        self.state = "released"
        self.poison()

    def poison(self) -> None:
        for parameter in self.parameters:
            # As `.data`, so that backward finds the version of the weights that it expects.
            parameter.data.fill_(torch.nan)

    def gather(self) -> None:
        self.events.append("gather")
        assert self.state == "released"
        self.state = "coming"

    def await_weights(self) -> None:
        self.events.append("await")
        assert self.state == "coming"
        self.state = "whole"
        for parameter, kept in zip(self.parameters, self.kept, strict=True):
            parameter.data.copy_(kept)

    def release(self) -> None:
        self.events.append("release")
        self.state = "released"
        self.poison()

    def assert_released(self) -> None:
        assert self.state == "released"
        assert all(bool(parameter.isnan().all()) for parameter in self.parameters)


class Sums:
    """A reducer that moves gradients into a place of its own, and counts how often."""

    def __init__(self, *modules: nn.Module) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        self.kept = [torch.zeros_like(p) for p in self.parameters]
        self.armed = False
        self.reductions = 0

    def last_backward(self) -> None:
        assert not self.armed
        self.armed = True

    def reduce(self) -> None:
        assert self.armed
        self.armed = False
        self.reductions += 1
        for kept, parameter in zip(self.kept, self.parameters, strict=True):
            if parameter.grad is not None:
                kept += parameter.grad
                parameter.grad = None


@settings(max_examples=30)
@given(
    schedule=SCHEDULES,
    plan=weight_plans(),
    order=st.sampled_from(["s", "es", "see", "eese"]),
    receive_ahead=st.booleans(),
)
def test_weights_that_are_nan_while_released_give_the_gradients_of_the_serial_run(
    schedule: Schedule, plan: WeightPlan, order: str, receive_ahead: bool
) -> None:
    m, last = schedule.num_microbatches, schedule.num_stages - 1
    serial = [Layer(stage) for stage in range(schedule.num_stages)]
    right = serial_step(serial, inputs, squares, m, divisor=DIVISOR)
    lowered = lower(schedule, plan)
    sharded = plan.stages_in(schedule)

    def on_rank(comm: Communicator) -> dict[int, tuple[Sums, int]]:
        stages = {s: Layer(s) for s in schedule.stages_of(comm.rank)}
        keepers = {s: Keeper(stage) for s, stage in stages.items() if s in sharded}
        sums = {s: Sums(stage) for s, stage in stages.items()}
        executor = PipelineExecutor(
            lowered,
            stages,
            comm,
            loss=squares,
            reducers=sums,
            weights=keepers,
            receive_ahead=receive_ahead,
        )
        gathers = 0
        for letter in order:
            for keeper in keepers.values():
                keeper.events.clear()
            if letter == "e":
                loss = executor.evaluate(inputs, m).loss_sum
            else:
                loss = executor.step(inputs, divisor=DIVISOR).loss_sum
                gathers = sum(k.events.count("gather") for k in keepers.values())
            torch.testing.assert_close(
                loss, right if last in stages else torch.zeros((), dtype=F64)
            )
            for keeper in keepers.values():
                keeper.assert_released()
        promised = weight_traffic(lowered)
        assert gathers == sum(promised[s].gathers for s in stages)
        return {s: (sums[s], promised[s].reductions) for s in stages}

    outcomes = LocalWorld(schedule.num_ranks, timeout_s=10.0).run(on_rank)

    for stage, (seen, reductions) in (item for o in outcomes for item in o.items()):
        assert seen.reductions == reductions
        for gradient, parameter in zip(seen.kept, serial[stage].parameters(), strict=True):
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def layers(number: int) -> dict[int, Layer]:
    return {stage: Layer(stage) for stage in range(number)}


def on_one_rank(
    schedule: Schedule,
    stages: Mapping[int, Layer],
    weights: Mapping[int, Any],
    **options: Any,
) -> PipelineExecutor:
    options.setdefault("loss", squares)
    return PipelineExecutor(schedule, stages, SingleCommunicator(), weights=weights, **options)


def test_a_fake_keeper_is_a_keeper_and_its_poison_is_seen() -> None:
    layer = Layer(0)
    keeper = Keeper(layer)
    assert isinstance(keeper, WeightKeeper)
    assert bool(layer(torch.ones(2, 3, dtype=F64), 0).isnan().all())


def test_a_schedule_that_is_lowered_here_gathers_once_a_step() -> None:
    stages = layers(1)
    keeper = Keeper(stages[0])
    executor = on_one_rank(gpipe(1, 3), stages, {0: keeper})

    executor.step(inputs, divisor=1.0)

    assert keeper.events == ["gather", "await", "release"]
    assert str(executor.schedule).startswith("rank 0: 0UNSHARD 0F0")


def test_weights_are_awaited_by_the_first_computation_that_needs_them() -> None:
    stages = layers(3)
    keepers = {stage: Keeper(layer) for stage, layer in stages.items()}
    executor = on_one_rank(lower(from_text(ALONE, [0, 0, 0], 2), WeightPlan()), stages, keepers)

    timeline = executor.step(inputs, divisor=1.0, timed=True).timeline

    assert timeline is not None
    done = [f"{entry.operation} {entry.stage}" for entry in timeline]
    assert done[:9] == [
        "GATHER 0", "GATHER 1", "wait for weights 0", "F 0", "GATHER 2", "wait for weights 1",
        "F 1", "wait for weights 2", "F 2",
    ]  # fmt: skip
    assert done[-2:] == ["B 0", "RELEASE 0"]
    assert [done.count(f"wait for weights {stage}") for stage in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("keep", [None, 0, 1, 2])
def test_one_keeper_of_several_stages_is_gathered_with_the_first_and_released_with_the_last(
    keep: int | None,
) -> None:
    stages, serial = layers(3), [Layer(stage) for stage in range(3)]
    keeper = Keeper(*stages.values())
    schedule = lower(from_text(ALONE, [0, 0, 0], 2), WeightPlan(keep=keep))
    executor = on_one_rank(schedule, stages, dict.fromkeys(stages, keeper))
    right = serial_step(serial, inputs, squares, 2, divisor=1.0)

    seen = executor.step(inputs, divisor=1.0).loss_sum

    torch.testing.assert_close(seen, right)
    for stage, other in zip(stages.values(), serial, strict=True):
        torch.testing.assert_close(stage.first.grad, other.first.grad)
    keeper.assert_released()
    times = {None: 1, 0: 12, 1: 8, 2: 1}[keep]
    assert keeper.events == ["gather", "await", "release"] * times


@pytest.mark.parametrize(("each", "wanted"), [(False, 1), (True, 2)])
def test_one_reducer_of_several_stages_reduces_each_time_after_all_of_them(
    each: bool, wanted: int
) -> None:
    stages = layers(3)
    sums = Sums(*stages.values())
    plan = WeightPlan(stages=(), reduce_each_backward=each)
    schedule = lower(from_text(ALONE, [0, 0, 0], 2), plan)
    executor = on_one_rank(schedule, stages, {}, reducers=dict.fromkeys(stages, sums))

    executor.step(inputs, divisor=1.0)

    assert sums.reductions == wanted
    assert all(parameter.grad is None for parameter in sums.parameters)


def test_steps_that_only_accumulate_gather_and_release_and_do_not_reduce() -> None:
    stages, serial = layers(1), Layer(0)
    keeper, sums = Keeper(stages[0]), Sums(stages[0])
    executor = on_one_rank(gpipe(1, 2), stages, {0: keeper}, reducers={0: sums})
    serial_step([serial], inputs, squares, 2, divisor=0.5)

    executor.step(inputs, divisor=1.0, reduce=False)
    executor.evaluate(inputs, 3)
    executor.step(inputs, divisor=1.0, reduce=False)

    assert keeper.events == ["gather", "await", "release"] * 3
    assert sums.reductions == 0
    torch.testing.assert_close(stages[0].first.grad, serial.first.grad)


def test_an_evaluation_keeps_no_more_chunks_than_the_step() -> None:
    live: list[int] = []

    class Counting(Keeper):
        now = 0

        def gather(self) -> None:
            super().gather()
            Counting.now += 1
            live.append(Counting.now)

        def release(self) -> None:
            super().release()
            Counting.now -= 1

    for keep in (0, 1, 2):
        stages = layers(3)
        keepers = {stage: Counting(layer) for stage, layer in stages.items()}
        schedule = lower(from_text(ALONE, [0, 0, 0], 2), WeightPlan(keep=keep))
        executor = on_one_rank(schedule, stages, keepers)
        live.clear()
        executor.evaluate(inputs, 4)
        assert max(live) <= max(keep, 1)


def test_an_evaluation_keeps_as_many_chunks_as_its_own_rank_does_in_the_step() -> None:
    step = lower(from_text("0F0 1F0 1B0 0B0\n2F0 2B0", [0, 0, 1], 1), WeightPlan())

    evaluations = [forward_schedule(step, rank, 4) for rank in range(2)]

    live = [peak_live(schedule)[rank] for rank, schedule in enumerate(evaluations)]
    assert live == peak_live(step).tolist() == [2, 1]


def test_a_forward_only_schedule_gathers_and_releases() -> None:
    stages = layers(1)
    keeper = Keeper(stages[0])
    executor = on_one_rank(forward_only(1, 2), stages, {0: keeper})

    assert not executor.evaluate(inputs, 2).loss_sum.isnan()
    assert keeper.events == ["gather", "await", "release"]


@pytest.mark.parametrize("where", ["gather", "await_weights", "stage", "loss", "release"])
def test_whatever_raises_leaves_nothing_gathered_and_nothing_whole_when_peers_are_told(
    where: str,
) -> None:
    told: list[list[str]] = []
    keepers: dict[int, Keeper] = {}

    class Faulty(Keeper):
        def fail_at(self, place: str) -> None:
            if place == where and self.events.count(place.split("_")[0]) == 2:
                raise RuntimeError("broken")

        def gather(self) -> None:
            super().gather()
            self.fail_at("gather")

        def await_weights(self) -> None:
            super().await_weights()
            self.fail_at("await_weights")

        def release(self) -> None:
            super().release()
            self.fail_at("release")

    class Alone(SingleCommunicator):
        size = 2  # type: ignore[assignment]  # as if it had a peer to tell

        def abort(self, cause: BaseException | str) -> None:
            told.append([keeper.state for keeper in keepers.values()])

    calls = iter(range(100))

    def loss(output: torch.Tensor) -> torch.Tensor:
        if where == "loss" and next(calls) == 1:
            raise RuntimeError("broken")
        return squares(output)

    def faulty_inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
        if where == "stage" and (stage, microbatch) == (2, 1):
            raise RuntimeError("broken")
        return inputs(stage, microbatch)

    schedule = Schedule([*from_text(ALONE, [0, 0, 0], 2).actions, []], [0, 0, 0], 2)
    stages = layers(3)
    keepers |= {stage: Faulty(layer) for stage, layer in stages.items()}
    executor = PipelineExecutor(
        lower(schedule, WeightPlan(keep=2)), stages, Alone(), loss=loss, weights=keepers
    )

    with pytest.raises(RuntimeError, match="broken"):
        executor.step(faulty_inputs, divisor=1.0)

    assert len(told) == 1
    # What raised half-way through waiting may still have to wait for others.
    assert told[0].count("whole") == (where == "await_weights")
    for keeper in keepers.values():
        keeper.assert_released()


def test_a_release_that_fails_on_top_of_a_failure_is_noted_and_the_others_still_happen() -> None:
    class Stubborn(Keeper):
        def release(self) -> None:
            super().release()
            raise OSError("no memory to give back")

    def broken(output: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    stages = layers(3)
    keepers = {0: Keeper(stages[0]), 1: Stubborn(stages[1]), 2: Keeper(stages[2])}
    schedule = lower(from_text(ALONE, [0, 0, 0], 2), WeightPlan())
    executor = on_one_rank(schedule, stages, keepers, loss=broken)

    with pytest.raises(RuntimeError, match="broken") as caught:
        executor.step(inputs, divisor=1.0)

    assert any("releasing weights failed: OSError" in note for note in caught.value.__notes__)
    for keeper in keepers.values():
        keeper.assert_released()


def test_weights_that_do_not_fit_the_schedule_are_refused() -> None:
    stages = layers(1)
    keeper = Keeper(stages[0])
    with pytest.raises(PipelineError, match=r"weights are given for stages \[3\], but rank 0"):
        on_one_rank(gpipe(1, 1), stages, {3: keeper})
    with pytest.raises(PipelineError, match=r"gathers stages \[0\] .* given for stages \[\]"):
        on_one_rank(lower(gpipe(1, 1), WeightPlan()), stages, {})
    with pytest.raises(PipelineError, match=r"gathers stages \[\] .* given for stages \[0\]"):
        on_one_rank(lower(gpipe(1, 1)), stages, {0: keeper})
