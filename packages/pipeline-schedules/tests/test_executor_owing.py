"""Who waits for weight gradients that are owed: reducers, weight keepers, the end of a step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.pipeline_schedules import GENERATORS, Kind, Schedule, WeightPlan, lower
from trainwright.pipeline_schedules.execute import PipelineError, PipelineExecutor
from trainwright.pipeline_schedules.execute.program import Operation, Program


class Scale(nn.Module):
    """One linear layer of one weight, which is 1, and a norm-like gain that cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))
        nn.init.ones_(self.linear.weight)

    def forward(self, hidden: torch.Tensor | None = None, *, x: Any = None) -> torch.Tensor:
        start = hidden if x is None else x
        assert start is not None
        return self.linear(start) * self.gain


def gradients_of(stage: nn.Module) -> list[float]:
    return [float(p.grad) for p in stage.parameters() if p.grad is not None]


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


class Summing:
    """Adds gradients over data-parallel ranks; refuses those that come afterwards."""

    def __init__(self, module: nn.Module, dp: Communicator) -> None:
        self.log: list[str] = []
        self._module = module
        self._dp = dp
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.log.append(name))

    def last_backward(self) -> None:
        self.log.append("last_backward")

    def reduce(self) -> None:
        self.log.append("reduce")
        for parameter in self._module.parameters():
            assert parameter.grad is not None
            self._dp.all_reduce(parameter.grad).wait()


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1"])
def test_gradients_are_reduced_once_after_the_last_of_every_parameter(name: str) -> None:
    schedule = GENERATORS[name].make(2, 4, 2 if name == "interleaved-1f1b" else 1)

    def on_rank(world: Communicator) -> list[tuple[list[str], list[float]]]:
        dp = world.split(world.rank // 2, world.rank)
        pp = world.split(world.rank % 2, world.rank)
        assert dp is not None
        assert pp is not None
        stages = {stage: Scale() for stage in schedule.stages_of(pp.rank)}
        reducers = {number: Summing(stage, dp) for number, stage in stages.items()}
        x = torch.full((1, 1), (1.0, 3.0)[dp.rank] / 4, dtype=torch.float64)
        executor = PipelineExecutor(schedule, stages, pp, loss=total, reducers=reducers)
        executor.step(lambda stage, _: {"x": x} if stage == 0 else {}, divisor=2.0)
        return [(reducers[s].log, gradients_of(stage)) for s, stage in stages.items()]

    outcomes = LocalWorld(4, timeout_s=10.0).run(on_rank)

    for log, gradients in itertools.chain.from_iterable(outcomes):
        assert gradients == [2.0, 2.0]
        assert log.count("reduce") == log.count("last_backward") == 1
        assert log[-1] == "reduce"
        assert log.count("linear.weight") == log.count("gain") == 4
        armed = log[log.index("last_backward") : -1]
        # What is split is complete with the W that was announced, the gain was before.
        assert armed.count("linear.weight") == 1
        assert armed.count("gain") == (0 if name == "zb-h1" else 1)


class Keeper:
    """Its weights are NaN while they are released."""

    def __init__(self, module: nn.Module) -> None:
        self.log: list[str] = []
        self._whole = {p: p.detach().clone() for p in module.parameters()}
        self.release()

    def gather(self) -> None:
        self.log.append("gather")

    def await_weights(self) -> None:
        for parameter, whole in self._whole.items():
            parameter.data = whole.clone()

    def release(self) -> None:
        self.log.append("release")
        for parameter in self._whole:
            parameter.data = torch.full((), torch.nan, dtype=parameter.dtype).expand_as(parameter)


@pytest.mark.parametrize("keep", [None, 0, 1])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_w_needs_no_weights(name: str, keep: int | None) -> None:
    schedule = GENERATORS[name].make(2, 3, 2 if name == "zb-v" else 1)

    def gradients(keeps: bool) -> list[dict[int, list[float]]]:
        def on_rank(comm: Communicator) -> dict[int, list[float]]:
            stages = {stage: Scale() for stage in schedule.stages_of(comm.rank)}
            keepers = {s: Keeper(stage) for s, stage in stages.items()} if keeps else {}
            plan = WeightPlan(stages=None if keeps else (), keep=keep)
            executor = PipelineExecutor(
                lower(schedule, plan), stages, comm, loss=total, weights=keepers
            )
            executor.step(lambda stage, m: {"x": x(m)} if stage == 0 else {}, divisor=1.0)
            return {s: gradients_of(stage) for s, stage in stages.items()}

        return LocalWorld(2, timeout_s=10.0).run(on_rank)

    def x(microbatch: int) -> torch.Tensor:
        return torch.full((2, 1), 1.0 + microbatch, dtype=torch.float64)

    seen, right = gradients(True), gradients(False)

    assert seen == right


def single(rows: list[tuple[Kind, int, int]], stage: nn.Module, **options: Any) -> PipelineExecutor:
    microbatches = 1 + max(microbatch for _, _, microbatch in rows)
    schedule = Schedule([np.array(rows, dtype=np.int32)], [0], microbatches)
    options.setdefault("loss", total)
    return PipelineExecutor(schedule, {0: stage}, SingleCommunicator(), **options)


SPLIT = [(Kind.F, 0, 0), (Kind.I, 0, 0), (Kind.W, 0, 0)]


def one(stage: int, microbatch: int) -> Mapping[str, Any]:
    return {"x": torch.ones(2, 1, dtype=torch.float64)}


def test_a_step_that_ends_while_weight_gradients_are_owed_names_the_modules() -> None:
    executor = single(SPLIT, Scale())
    whole = executor._program
    without_w = [i for i in whole.instructions if i.operation is not Operation.WEIGHT_GRADIENT]
    executor._program = Program(tuple(without_w), whole.peak_in_flight, whole.split)

    with pytest.raises(PipelineError, match=r"weight gradients of stage 0 linear \(microbatch 0\)"):
        executor.step(one, divisor=1.0)

    executor._program = whole
    executor.step(one, divisor=1.0)


@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b", "zb-h1"])
def test_weights_have_gradients_under_every_schedule(name: str) -> None:
    stage = Scale()
    executor = PipelineExecutor(
        GENERATORS[name].make(1, 2, 1), {0: stage}, SingleCommunicator(), loss=total
    )

    executor.step(one, divisor=1.0)

    assert gradients_of(stage) == [4.0, 4.0]


def test_only_backwards_that_the_schedule_splits_owe_anything() -> None:
    stage = Scale()
    rows = [(Kind.F, 0, 0), (Kind.F, 0, 1), (Kind.I, 0, 1), (Kind.B, 0, 0), (Kind.W, 0, 1)]
    seen: list[float] = []
    stage.linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad)))

    def scaled(number: int, microbatch: int) -> Mapping[str, Any]:
        return {"x": torch.full((1, 1), 1.0 + 9 * microbatch, dtype=torch.float64)}

    result = single(rows, stage).step(scaled, divisor=1.0)

    # B adds its own at once, though the I before it still owes.
    assert seen == [1.0, 11.0]
    assert result.unsplit == {"stage 0": 1}


def test_a_stage_that_computes_gradients_in_its_forward_is_refused_where_it_is_split() -> None:
    class Penalty(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            output = super().forward(x=x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            return output + slope**2

    with pytest.raises(
        PipelineError, match="computes gradients in its forward needs a schedule of"
    ):
        single(SPLIT, Penalty()).step(one, divisor=1.0)


def test_weights_that_change_between_forward_and_backward_are_refused() -> None:
    stage = Scale()

    def loss(output: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            stage.linear.weight.mul_(2.0)
        return output.sum()

    with pytest.raises(PipelineError, match="changed in place between the forward and its I"):
        single(SPLIT, stage, loss=loss).step(one, divisor=1.0)


def test_an_input_that_changes_between_i_and_its_w_is_refused() -> None:
    buffer = torch.empty(1, 1)

    def inputs(number: int, microbatch: int) -> Mapping[str, Any]:
        return {"input": buffer.fill_(1.0 + microbatch)}

    rows = [(Kind.F, 0, 0), (Kind.I, 0, 0), (Kind.F, 0, 1), (Kind.I, 0, 1)]
    rows += [(Kind.W, 0, 0), (Kind.W, 0, 1)]
    with pytest.raises(PipelineError, match="kept from I to W was changed in place"):
        single(rows, nn.Linear(1, 1)).step(inputs, divisor=1.0)


def test_a_step_that_raised_leaves_nothing_owed() -> None:
    stage = Scale()
    fails = True

    def inputs(number: int, microbatch: int) -> Mapping[str, Any]:
        if microbatch == 1 and fails:
            raise RuntimeError("no more data")
        return one(number, microbatch)

    rows = [(kind, 0, 0) for kind in (Kind.F, Kind.I)]
    rows += [(Kind.F, 0, 1), (Kind.I, 0, 1), (Kind.W, 0, 0), (Kind.W, 0, 1)]
    executor = single(rows, stage)
    with pytest.raises(RuntimeError, match="no more data"):
        executor.step(inputs, divisor=1.0)
    assert executor._parts.debts.slots == ()
    fails = False
    stage.zero_grad()

    executor.step(inputs, divisor=1.0)

    assert stage.linear.weight.grad is not None
    assert float(stage.linear.weight.grad) == 4.0


def test_hooks_on_a_weight_that_is_used_twice_fire_once_a_microbatch() -> None:
    class Twice(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(super().forward(x=x))

    stage = Twice()
    calls: list[float] = []
    stage.linear.weight.register_hook(lambda gradient: calls.append(float(gradient)))

    single(SPLIT, stage).step(one, divisor=1.0)

    assert calls == [4.0]


def test_an_evaluation_between_steps_splits_nothing() -> None:
    stage = Scale()
    executor = single(SPLIT, stage)
    executor.step(one, divisor=1.0)

    result = executor.evaluate(one, 3)

    assert float(result.loss_sum) == 6.0
    assert result.whole_backwards == 0
    assert stage.linear.weight.grad is not None
    assert float(stage.linear.weight.grad) == 2.0
    executor.step(one, divisor=1.0)
    assert float(stage.linear.weight.grad) == 4.0
