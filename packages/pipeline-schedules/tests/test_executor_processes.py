"""The executor between real processes, over Gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, PeerFailedError
from trainwright.collectives.testing import run_processes
from trainwright.pipeline_schedules import gpipe, one_f_one_b, zb_h1
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec
from trainwright.pipeline_schedules.execute.testing import serial_step

F64 = torch.float64
ROWS = (3, 5, 2, 4)


class Mixed(nn.Module):
    """Hands on a hidden state, a mask, an empty tensor, a constant and a large number tensor."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=F64))

    def forward(self, *boundary: torch.Tensor, x: torch.Tensor | None = None) -> Any:
        if x is not None:
            return self.hand_on(torch.tanh(x @ self.weight), len(x))
        hidden, mask, empty, constant, numbers = boundary
        assert bool((numbers == len(hidden)).all())
        assert empty.shape == (0, 2)
        hidden = torch.tanh((hidden * mask + constant) @ self.weight)
        return self.hand_on(hidden, len(hidden))

    def hand_on(self, hidden: torch.Tensor, number: int) -> Any:
        constant = torch.full_like(hidden, 0.5, requires_grad=False).detach()
        numbers = torch.full((100_000,), number)
        return hidden, hidden > 0, hidden.new_empty(0, 2), constant, numbers


def weighted(output: Sequence[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return ((output[0] - target) ** 2).sum()


def inputs(num_stages: int, stage: int, microbatch: int) -> Mapping[str, Any]:
    generator = torch.Generator().manual_seed(microbatch)
    x, target = torch.randn(2, ROWS[microbatch], 4, generator=generator, dtype=F64)
    values = {}
    if stage == 0:
        values["x"] = x
    if stage == num_stages - 1:
        values["target"] = target
    return values


def follow_the_serial_run(comm: Communicator) -> None:
    size = comm.size
    serial = [Mixed(stage) for stage in range(size)]
    right = serial_step(serial, lambda s, m: inputs(size, s, m), weighted, 4, divisor=14.0)
    for make in (gpipe, one_f_one_b, zb_h1):
        stage = Mixed(comm.rank)
        executor = PipelineExecutor(make(size, 4), {comm.rank: stage}, comm, loss=weighted)
        seen = executor.evaluate(lambda s, m: inputs(size, s, m), 4).loss_sum
        again = executor.step(lambda s, m: inputs(size, s, m), divisor=14.0).loss_sum
        expected = right if comm.rank == size - 1 else torch.zeros((), dtype=F64)
        torch.testing.assert_close(seen, expected, rtol=1e-13, atol=0.0)
        torch.testing.assert_close(again, expected, rtol=1e-13, atol=0.0)
        torch.testing.assert_close(
            stage.weight.grad, serial[comm.rank].weight.grad, rtol=1e-12, atol=1e-13
        )


def follow_torch(comm: Communicator) -> None:
    # Slow to import, and only these processes need it.
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(comm.rank)
    ours, theirs = nn.Linear(6, 6, dtype=F64), nn.Linear(6, 6, dtype=F64)
    theirs.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, 8, 6, generator=generator, dtype=F64)
    loss = nn.MSELoss(reduction="sum")
    first, last = comm.rank == 0, comm.rank == comm.size - 1

    boundary = BoundarySpec.uniform(comm.size, TensorSpec((2, 6), F64))
    executor = PipelineExecutor(
        one_f_one_b(comm.size, 4), {comm.rank: ours}, comm, loss=loss, boundary=boundary
    )
    names = {"input": x.split(2)} if first else {}
    names |= {"target": target.split(2)} if last else {}
    executor.step(lambda s, m: {name: parts[m] for name, parts in names.items()}, divisor=1.0)
    stage = PipelineStage(theirs, comm.rank, comm.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=loss, scale_grads=False)
    schedule.step(*((x,) if first else ()), **({"target": target} if last else {}))

    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-12, atol=1e-12)


def agree(comm: Communicator) -> None:
    follow_the_serial_run(comm)
    follow_torch(comm)


def break_in_the_middle(comm: Communicator, report: Path) -> None:
    class Faulty(nn.Identity):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if comm.rank == 1 and self.calls == 3:
                raise RuntimeError("broken stage")
            return input * 2

    executor = PipelineExecutor(
        one_f_one_b(2, 8), {comm.rank: Faulty()}, comm, loss=lambda output: output.sum()
    )
    try:
        executor.step(lambda s, m: {"input": torch.ones(3)} if s == 0 else {}, divisor=1.0)
    except PeerFailedError as error:
        report.write_text(f"rank {comm.rank} heard: {error}")
        raise


@pytest.mark.processes
def test_processes_compute_what_one_process_and_what_torch_computes() -> None:
    run_processes(agree, 2, timeout_s=200.0)


@pytest.mark.processes
def test_a_process_whose_stage_raises_stops_the_others(tmp_path: Path) -> None:
    report = tmp_path / "report"

    with pytest.raises(RuntimeError, match="broken stage"):
        run_processes(break_in_the_middle, 2, report, timeout_s=200.0)

    assert report.read_text().startswith("rank 0 heard: rank 1 failed")
