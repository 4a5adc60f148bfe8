"""What the executor holds, and when it starts and ends its messages."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, Work
from trainwright.pipeline_schedules import Kind, Schedule, gpipe, one_f_one_b, sequential
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec

F64 = torch.float64
SPEC = TensorSpec((2, 3), F64)


def inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
    return {"x": torch.full((2, 3), 0.1 * microbatch, dtype=F64)} if stage == 0 else {}


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


class Traced(nn.Module):
    """Tells when it runs and keeps weak references to its input, what it saves, its output."""

    def __init__(self, log: Log, stage: int) -> None:
        super().__init__()
        self.log = log
        self.stage = stage
        self.inner = nn.Linear(3, 3, dtype=F64)
        self.outer = nn.Linear(3, 3, dtype=F64)

    def forward(self, hidden: torch.Tensor | None = None, x: Any = None) -> torch.Tensor:
        self.log.events.append(("F", self.stage))
        start = hidden if x is None else x
        assert start is not None
        saved = torch.tanh(self.inner(start))
        output = self.outer(saved)
        if saved.requires_grad:
            saved.register_hook(lambda _: self.log.events.append(("B", self.stage)))
        self.log.refs["saved"].append(weakref.ref(saved))
        self.log.refs["output"].append(weakref.ref(output))
        if hidden is not None:
            self.log.refs["input"].append(weakref.ref(hidden))
        self.log.note_alive()
        return output


class TracedWork:
    def __init__(self, work: Work, log: Log, name: str) -> None:
        self.work, self.log, self.name = work, log, name
        self.waited = False

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.waited:
            self.waited = True
            self.log.events.append((f"wait {self.name}", self.log.rank))
            self.log.open[self.name] -= 1
        self.work.wait(timeout_s)


class Log:
    """A transport that writes down, in order, what is started and waited for."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.events: list[tuple[str, int]] = []
        self.messages: list[tuple[str, int, int]] = []
        self.refs: dict[str, list[Any]] = defaultdict(list)
        self.alive: dict[str, int] = defaultdict(int)
        self.open: dict[str, int] = defaultdict(int)
        self.most_open: dict[str, int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        return self._trace("send", tensor, peer, self.comm.send(tensor, peer, tag))

    def recv(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> Work:
        return self._trace("recv", tensor, peer, self.comm.recv(tensor, peer, tag))

    def abort(self, cause: BaseException | str) -> None:
        self.comm.abort(cause)

    def note_alive(self) -> None:
        for name, references in self.refs.items():
            now = sum(reference() is not None for reference in references)
            self.alive[name] = max(self.alive[name], now)

    def _trace(self, name: str, tensor: torch.Tensor, peer: int, work: Work) -> Work:
        self.events.append((name, peer))
        self.messages.append((name, peer, tensor.numel()))
        self.open[name] += 1
        self.most_open[name] = max(self.most_open[name], self.open[name])
        return TracedWork(work, self, name)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def logs_of(
    schedule: Schedule, use: Callable[[PipelineExecutor], object], **options: Any
) -> list[Log]:
    def on_rank(comm: Communicator) -> Log:
        log = Log(comm)
        stages = {s: Traced(log, s) for s in schedule.stages_of(comm.rank)}
        use(PipelineExecutor(schedule, stages, log, loss=total, **options))
        return log

    return LocalWorld(schedule.num_ranks, timeout_s=10.0).run(on_rank)


def one_step(executor: PipelineExecutor) -> None:
    executor.step(inputs, divisor=1.0)


@pytest.mark.parametrize("make", [sequential, gpipe, one_f_one_b])
@pytest.mark.parametrize("declared", [True, False])
def test_a_rank_holds_only_the_microbatches_in_flight_and_after_the_step_none(
    make: Callable[[int, int], Schedule], declared: bool
) -> None:
    ranks, microbatches = 3, 6
    boundary = BoundarySpec.uniform(ranks, SPEC) if declared else None

    with no_garbage_collection():
        logs = logs_of(make(ranks, microbatches), one_step, boundary=boundary)
        left = [r() for log in logs for references in log.refs.values() for r in references]

    assert all(reference is None for reference in left)
    in_flight = {
        sequential: [1, 1, 1],
        gpipe: [6, 6, 6],
        one_f_one_b: [3, 2, 1],
    }[make]
    for log, allowed in zip(logs, in_flight, strict=True):
        assert log.alive["saved"] == allowed
        # Outputs that are still being sent; those of the last stage end in its loss.
        assert log.alive["output"] <= allowed
        assert log.alive["input"] <= allowed


def test_open_sends_are_bounded_by_the_microbatches_in_flight() -> None:
    ranks, microbatches = 3, 12
    boundary = BoundarySpec.uniform(ranks, SPEC)

    logs = logs_of(one_f_one_b(ranks, microbatches), one_step, boundary=boundary)

    for log, in_flight in zip(logs, [3, 2, 1], strict=True):
        directions = (log.rank > 0) + (log.rank < ranks - 1)
        # One more is open for the moment in which the oldest is waited for.
        assert log.most_open["send"] <= directions * (in_flight + 1)
        # One is used, and one is started before each of the two computations in front of it.
        assert log.most_open["recv"] <= directions * 3
        assert log.open["send"] == log.open["recv"] == 0


def test_an_evaluation_holds_no_more_for_more_microbatches() -> None:
    def evaluate(executor: PipelineExecutor) -> None:
        executor.evaluate(inputs, 20)

    boundary = BoundarySpec.uniform(3, SPEC)

    logs = logs_of(one_f_one_b(3, 2), evaluate, boundary=boundary)

    for log in logs:
        assert log.open["send"] == 0
        assert log.most_open["send"] <= 3
        assert log.alive["saved"] == 1
        assert log.alive["output"] <= 4


def test_a_receive_is_started_before_the_two_computations_in_front_of_it() -> None:
    boundary = BoundarySpec.uniform(2, SPEC)

    first, last = logs_of(one_f_one_b(2, 3), one_step, boundary=boundary)

    done = [name for name, _ in last.events if name in ("recv", "F", "B")]
    assert done == ["recv", "recv", "F", "B", "recv", "F", "B", "F", "B"]
    gradients = [name for name, _ in first.events if name in ("recv", "F", "B")]
    assert gradients.index("recv") < gradients.index("B") - 1


def test_sends_are_not_waited_for_before_their_gradient_is_back() -> None:
    boundary = BoundarySpec.uniform(2, SPEC)

    first, _ = logs_of(gpipe(2, 4), one_step, boundary=boundary)

    names = [name for name, _ in first.events]
    assert "wait send" not in names[: names.index("wait recv")]
    backward = [name for name in names if name in ("wait recv", "wait send", "B")]
    assert backward == ["wait recv", "wait send", "B"] * 4


def placed(rank_of_stage: list[int], num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, for any placement."""
    stages = range(len(rank_of_stage))
    order = [(Kind.F, s, m) for m in range(num_microbatches) for s in stages]
    order += [(Kind.B, s, m) for m in range(num_microbatches) for s in reversed(stages)]
    ranks = range(max(rank_of_stage) + 1)
    actions = [np.array([r for r in order if rank_of_stage[r[1]] == q], np.int32) for q in ranks]
    return Schedule(actions, rank_of_stage, num_microbatches)


@settings(max_examples=15, deadline=None)
@given(
    schedule=st.one_of(
        st.builds(one_f_one_b, st.integers(2, 4), st.integers(1, 6)),
        st.builds(gpipe, st.integers(2, 3), st.integers(1, 4)),
        st.builds(
            placed,
            st.lists(st.integers(0, 1), min_size=2, max_size=5).map(lambda ranks: [0, 1, *ranks]),
            st.integers(1, 3),
        ),
    ),
    declared=st.booleans(),
)
def test_transports_without_tags_see_the_same_order_of_messages_on_both_sides(
    schedule: Schedule, declared: bool
) -> None:
    boundary = BoundarySpec.uniform(schedule.num_stages, SPEC) if declared else None

    def step_and_evaluate(executor: PipelineExecutor) -> None:
        executor.step(inputs, divisor=1.0)
        executor.evaluate(inputs, 5)

    logs = logs_of(schedule, step_and_evaluate, boundary=boundary, receive_ahead=False)

    mirror = {"send": "recv", "recv": "send"}
    for log in logs:
        for peer in range(len(logs)):
            ours = [(name, n) for name, p, n in log.messages if p == peer]
            theirs = [(mirror[name], n) for name, p, n in logs[peer].messages if p == log.rank]
            assert ours == theirs
