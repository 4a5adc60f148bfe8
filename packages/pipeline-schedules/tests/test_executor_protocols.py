"""How the executor treats schedules, reducers, failures and clocks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, PeerFailedError, SingleCommunicator
from trainwright.pipeline_schedules import (
    Kind,
    Schedule,
    ScheduleError,
    forward_only,
    gpipe,
    lower,
    one_f_one_b,
    sequential,
)
from trainwright.pipeline_schedules.execute import (
    PipelineError,
    PipelineExecutor,
    Reducer,
    Timed,
    Transport,
)
from trainwright.pipeline_schedules.execute.program import Instruction, Operation
from trainwright.pipeline_schedules.execute.stopwatch import (
    HostStopwatch,
    StreamStopwatch,
    stopwatch_for,
)


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
    if stage > 0:
        return {}
    return {"hidden": torch.full((2,), 1.0 + microbatch, dtype=torch.float64)}


def single(schedule: Schedule, stage: nn.Module | None = None, **options: Any) -> PipelineExecutor:
    stages = {0: Affine() if stage is None else stage}
    options.setdefault("loss", total)
    return PipelineExecutor(schedule, stages, SingleCommunicator(), **options)


class Log:
    """A reducer that writes down what is asked of it, between the backwards it sees."""

    def __init__(self, stage: nn.Module | None = None) -> None:
        self.calls: list[str] = []
        if stage is not None:
            stage.register_full_backward_hook(lambda *_: self.calls.append("backward"))

    def last_backward(self) -> None:
        self.calls.append("last_backward")

    def reduce(self) -> None:
        self.calls.append("reduce")


class Hooked(Affine):
    """Tells a log when its backward runs."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.weight.register_post_accumulate_grad_hook(lambda _: log.calls.append("backward"))


def test_a_communicator_is_a_transport() -> None:
    assert isinstance(SingleCommunicator(), Transport)
    assert isinstance(Log(), Reducer)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make", [sequential, gpipe, one_f_one_b])
def test_a_reducer_is_armed_before_the_last_backward_and_started_once_after_it(
    ranks: int, make: Any
) -> None:
    def on_rank(comm: Communicator) -> list[str]:
        log = Log()
        executor = PipelineExecutor(
            make(ranks, 3), {comm.rank: Hooked(log)}, comm, loss=total, reducers={comm.rank: log}
        )
        executor.step(inputs, divisor=1.0)
        return log.calls

    calls = LocalWorld(ranks, timeout_s=10.0).run(on_rank)

    once = ["backward", "backward", "last_backward", "backward", "reduce"]
    assert calls == [once] * ranks


def test_steps_that_only_accumulate_leave_reducers_alone() -> None:
    log = Log()
    executor = single(sequential(1, 1), Hooked(log), reducers={0: log})

    executor.step(inputs, divisor=1.0, reduce=False)
    executor.evaluate(inputs, 2)
    executor.step(inputs, divisor=1.0)

    assert log.calls == ["backward", "last_backward", "backward", "reduce"]


def test_a_reducer_of_several_stages_acts_once_after_all_of_them() -> None:
    log = Log()
    stages = {0: Hooked(log), 1: Hooked(log)}
    rows = [(Kind.F, 0, 0), (Kind.F, 1, 0), (Kind.B, 1, 0), (Kind.B, 0, 0)]
    schedule = Schedule([np.array(rows, dtype=np.int32)], [0, 0], 1)
    executor = PipelineExecutor(
        schedule, stages, SingleCommunicator(), loss=total, reducers={0: log, 1: log}
    )

    executor.step(inputs, divisor=1.0)

    assert log.calls == ["backward", "last_backward", "backward", "reduce"]


def test_tied_weights_on_one_rank_add_both_gradients_once() -> None:
    stage = Affine()
    rows = [(Kind.F, 0, 0), (Kind.F, 1, 0), (Kind.B, 1, 0), (Kind.B, 0, 0)]
    schedule = Schedule([np.array(rows, dtype=np.int32)], [0, 0], 1)
    executor = PipelineExecutor(schedule, {0: stage, 1: stage}, SingleCommunicator(), loss=total)

    executor.step(inputs, divisor=1.0)

    # The loss is 2 w², summed over two elements of value one: its derivative is 4 w.
    assert stage.weight.grad is not None
    assert float(stage.weight.grad) == pytest.approx(2.0)


@pytest.mark.parametrize("where", ["forward", "backward", "loss", "inputs"])
def test_a_stage_that_raises_stops_its_peers_and_names_the_place(where: str) -> None:
    class Fault(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise RuntimeError("broken stage")
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken stage")

    class Faulty(Affine):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = super().forward(hidden)
            return Fault.apply(output) if where in ("forward", "backward") else output

    def faulty_loss(output: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            raise RuntimeError("broken stage")
        return output.sum()

    def faulty_inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
        if where == "inputs" and stage == 2:
            raise RuntimeError("broken stage")
        return inputs(stage, microbatch)

    seen: dict[int, BaseException] = {}

    def on_rank(comm: Communicator) -> None:
        stage = Faulty() if comm.rank == 2 else Affine()
        executor = PipelineExecutor(one_f_one_b(3, 4), {comm.rank: stage}, comm, loss=faulty_loss)
        try:
            executor.step(faulty_inputs, divisor=1.0)
        except BaseException as error:
            seen[comm.rank] = error
            raise

    started = time.monotonic()
    with pytest.raises(RuntimeError, match="broken stage"):
        LocalWorld(3, timeout_s=20.0).run(on_rank)

    assert time.monotonic() - started < 5.0
    assert any("on rank 2 of the pipeline" in note for note in seen[2].__notes__)
    assert isinstance(seen[0], PeerFailedError)
    assert isinstance(seen[1], PeerFailedError)
    assert "broken stage" in str(seen[0])


def test_the_transport_is_told_why_a_rank_gives_up() -> None:
    told: list[BaseException] = []

    class Aborting:
        rank, size, device = 0, 2, torch.device("cpu")

        def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Any:
            raise OSError("no link")

        recv = send

        def abort(self, cause: BaseException) -> None:
            told.append(cause)
            raise OSError("no link either")

    executor = PipelineExecutor(gpipe(2, 1), {0: Affine()}, Aborting(), loss=total)

    with pytest.raises(OSError, match="no link") as caught:
        executor.step(inputs, divisor=1.0)

    assert told == [caught.value]
    assert any("telling the other ranks failed" in note for note in caught.value.__notes__)


def test_a_rank_that_is_told_of_a_failure_does_not_tell_it_again() -> None:
    told: list[BaseException] = []

    class Broken:
        rank, size, device = 0, 2, torch.device("cpu")

        def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Any:
            raise PeerFailedError(1, "broken stage")

        recv = send
        abort = told.append

    executor = PipelineExecutor(gpipe(2, 1), {0: Affine()}, Broken(), loss=total)

    with pytest.raises(PeerFailedError):
        executor.step(inputs, divisor=1.0)

    assert told == []


def test_one_rank_can_go_on_after_a_step_that_raised() -> None:
    comm = SingleCommunicator()
    executor = PipelineExecutor(sequential(1, 2), {0: Affine()}, comm, loss=total)

    with pytest.raises(KeyError):
        executor.step(lambda s, m: {}[m], divisor=1.0)
    result = executor.step(inputs, divisor=1.0)

    assert float(result.loss_sum) == 0.5 * (2 + 4)
    comm.barrier()


def test_what_does_not_fit_the_schedule_is_refused_before_anything_is_sent() -> None:
    comm, stage = SingleCommunicator(), Affine()

    with pytest.raises(PipelineError, match=r"for 2 ranks but the transport has 1"):
        PipelineExecutor(gpipe(2, 1), {0: stage}, comm, loss=total)
    with pytest.raises(PipelineError, match=r"owns stages \[0\] .* got modules for stages \[1\]"):
        PipelineExecutor(gpipe(1, 1), {1: stage}, comm, loss=total)
    with pytest.raises(PipelineError, match=r"reducers are given for stages \[3\]"):
        PipelineExecutor(gpipe(1, 1), {0: stage}, comm, loss=total, reducers={3: Log()})


def test_a_broken_schedule_is_refused_also_where_it_is_lowered_already() -> None:
    good = lower(gpipe(1, 2))
    twice = [np.concatenate([good.actions[0][:1], good.actions[0]])]

    with pytest.raises(ScheduleError):
        single(Schedule(twice, good.rank_of_stage, 2, lowered=True))


def test_a_forward_only_schedule_evaluates_and_has_no_step() -> None:
    executor = single(forward_only(1, 2))

    assert float(executor.evaluate(inputs, 2).loss_sum) == 3.0
    with pytest.raises(PipelineError, match="call evaluate"):
        executor.step(inputs, divisor=1.0)


def test_a_step_refuses_what_would_lose_the_gradients() -> None:
    executor = single(sequential(1, 1))

    with torch.no_grad(), pytest.raises(PipelineError, match="switched off"):
        executor.step(inputs, divisor=1.0)
    for divisor in (-1.0, float("nan")):
        with pytest.raises(PipelineError, match="divisor must be the number of valid tokens"):
            executor.step(inputs, divisor=divisor)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output: output, r"0-d; got shape \[2\]"),
        (lambda output: 1.0, r"0-d; got float"),
        (lambda output: output.sum().bfloat16(), r"got torch.bfloat16; sum it in float32"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused(loss: Any, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        single(sequential(1, 1), loss=loss).step(inputs, divisor=1.0)


def test_each_loss_is_seeded_in_its_own_dtype() -> None:
    dtypes = [torch.float32, torch.float64]
    stage = Affine()
    executor = single(sequential(1, 2), stage, loss=lambda output, dtype: output.sum().to(dtype))

    executor.step(
        lambda s, m: {
            "hidden": torch.full((1,), float(m), dtype=torch.float64),
            "dtype": dtypes[m],
        },
        divisor=3.0,
    )

    assert stage.weight.grad is not None
    assert float(stage.weight.grad) == 1 / 3


def test_stage_and_loss_each_get_the_inputs_they_have_a_parameter_for() -> None:
    def loss(output: torch.Tensor, hidden: torch.Tensor, weight: float) -> torch.Tensor:
        return weight * (output - hidden).sum()

    executor = single(sequential(1, 1), loss=loss)

    result = executor.step(lambda s, m: {**inputs(s, m), "weight": 3.0}, divisor=1.0)

    assert float(result.loss_sum) == -3.0
    with pytest.raises(PipelineError, match=r"hold \['typo'\], which neither the stage"):
        executor.step(lambda s, m: {**inputs(s, m), "weight": 3.0, "typo": 1}, divisor=1.0)


def test_a_module_may_be_the_loss() -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    executor = single(sequential(1, 1), nn.Linear(3, 5), loss=loss)

    result = executor.step(
        lambda s, m: {"input": torch.ones(2, 3), "target": torch.tensor([1, 4])}, divisor=2.0
    )

    assert float(result.loss_sum) > 0


def test_a_timeline_holds_every_operation_in_order_where_it_is_asked_for() -> None:
    def on_rank(comm: Communicator) -> Any:
        executor = PipelineExecutor(gpipe(2, 2), {comm.rank: Affine()}, comm, loss=total)
        assert executor.step(inputs, divisor=1.0).timeline is None
        before = time.perf_counter()
        result = executor.step(inputs, divisor=1.0, timed=True)
        assert before <= result.began_s <= time.perf_counter()
        return result.timeline

    first, last = LocalWorld(2, timeout_s=10.0).run(on_rank)

    for timeline in (first, last):
        assert all(entry.start_s <= entry.stop_s for entry in timeline)
        assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(timeline))
    computed = [
        (entry.operation, entry.microbatch) for entry in last if entry.operation in ("F", "B")
    ]
    assert computed == [("F", 0), ("F", 1), ("B", 0), ("B", 1)]
    assert {entry.operation for entry in first} == {
        "F",
        "SEND_F",
        "RECV_B",
        "wait for gradient",
        "B",
    }


def test_an_accelerators_timeline_has_the_times_at_which_its_stream_passed_events() -> None:
    clock = iter(range(100))

    class Event:
        """Passed at the next full millisecond; ``synchronize`` is asked for once."""

        waited = 0

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None:
            Event.waited += 1

        def elapsed_time(self, later: Event) -> float:
            return float(later.at - self.at)

    watch = StreamStopwatch(Event)
    for operation in (Operation.FORWARD, Operation.BACKWARD):
        watch.start()
        watch.stop(Instruction(operation, stage=0, microbatch=1, label=""))

    assert watch.read() == (Timed("F", 0, 1, 0.001, 0.002), Timed("B", 0, 1, 0.003, 0.004))
    assert Event.waited == 1
    assert isinstance(stopwatch_for(torch.device("cpu")), HostStopwatch)


def test_profilers_see_readable_names() -> None:
    executor = single(sequential(1, 2))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        executor.step(inputs, divisor=1.0)

    names = {event.key for event in profile.key_averages()}
    assert {"pipeline: F stage 0 microbatch 1", "pipeline: B stage 0 microbatch 0"} <= names
