"""PyTorch's pipelining reads and runs our schedules, and we read and run PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld
from trainwright.collectives.testing import run_processes
from trainwright.pipeline_schedules import (
    Costs,
    Kind,
    Schedule,
    from_csv,
    interleaved_1f1b,
    lower,
    one_f_one_b,
    search,
    simulate,
    v_shape,
    verify,
    write_csv,
    zb_v,
)
from trainwright.pipeline_schedules.execute import PipelineExecutor

F64 = torch.float64
MICROBATCHES = 4
THEIRS = [
    # Their name, ranks, chunks a rank, microbatches.
    ("Interleaved1F1B", 2, 2, 4),
    ("Interleaved1F1B", 4, 3, 10),
    ("LoopedBFS", 3, 2, 4),
    ("InterleavedZeroBubble", 2, 2, 4),
    ("InterleavedZeroBubble", 4, 2, 8),
    ("ZBVZeroBubble", 2, 2, 4),
    ("ZBVZeroBubble", 4, 2, 3),
    ("DualPipeV", 2, 2, 6),
    ("DualPipeV", 4, 2, 16),
]


def table_of(name: str, ranks: int, chunks: int, microbatches: int, form: str, folder: Path) -> str:
    """The table that PyTorch writes for one of its schedules, without a process group."""
    # Slow to import, and only these tests need it.
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * chunks,
            stage_index=chunk,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    made = get_schedule_class(name)(stages, microbatches, loss_fn=lambda output: output)
    made._dump_csv(str(folder / "table.csv"), format=form)
    return (folder / "table.csv").read_bytes().decode()


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), THEIRS)
def test_schedules_of_pytorch_are_read_in_both_forms_and_work(
    name: str, ranks: int, chunks: int, microbatches: int, tmp_path: Path
) -> None:
    size = (ranks, chunks, microbatches)
    plain = from_csv(table_of(name, *size, "compute_only", tmp_path))
    complete = from_csv(table_of(name, *size, "compute_comms", tmp_path))
    assert (plain.lowered, complete.lowered) == (False, True)
    for schedule in (plain, complete, lower(plain)):
        assert (schedule.num_ranks, schedule.num_microbatches) == (ranks, microbatches)
        for send in ("rendezvous", "buffered", 1):
            verify(schedule, send)  # type: ignore[arg-type]
    assert simulate(plain).makespan == simulate(complete).makespan


def stage_module(stage: int) -> nn.Module:
    generator = torch.Generator().manual_seed(stage)
    module = nn.Sequential(nn.Linear(6, 6, dtype=F64), nn.Tanh())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64) / 3)
    return module


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, 2 * microbatches, 6, generator=generator, dtype=F64)
    return x, target


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


def serial_gradients(stages: int, microbatches: int) -> list[list[torch.Tensor]]:
    modules = [stage_module(stage) for stage in range(stages)]
    x, target = batch(microbatches)
    squares(nn.Sequential(*modules)(x), target).backward()
    return [[p.grad for p in module.parameters() if p.grad is not None] for module in modules]


def require_serial_gradients(modules: Mapping[int, nn.Module], schedule: Schedule) -> None:
    right = serial_gradients(schedule.num_stages, schedule.num_microbatches)
    for stage, module in modules.items():
        for parameter, expected in zip(module.parameters(), right[stage], strict=True):
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-13)


def ours() -> list[Schedule]:
    uneven = Costs([1.0, 2.0, 1.0, 1.5], 1.25, [0.5, 1.0, 0.75, 1.0], latency=0.1)
    searched = search(v_shape(2), MICROBATCHES, uneven, memory_limit=5, budget=20_000).schedule
    return [
        one_f_one_b(2, MICROBATCHES),
        interleaved_1f1b(2, MICROBATCHES, 2),
        zb_v(2, MICROBATCHES),
        search([0, 1], MICROBATCHES, Costs(1, 1.1, 0.9), budget=20_000).schedule,
        searched,
    ]


def run_in_pytorch(comm: Communicator, folder: Path) -> list[str]:
    """Run each of our tables, of both forms, in PyTorch's runtime on this rank."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    done = []
    for number, schedule in enumerate(ours()):
        for form, table in (("compute_only", schedule), ("compute_comms", lower(schedule))):
            path = folder / f"{comm.rank}-{number}-{form}.csv"
            write_csv(table, path)
            own = {stage: stage_module(stage) for stage in schedule.stages_of(comm.rank)}
            stages = [
                PipelineStage(module, stage, schedule.num_stages, torch.device("cpu"))
                for stage, module in own.items()
            ]
            runtime = _PipelineScheduleRuntime(
                stages, MICROBATCHES, loss_fn=squares, scale_grads=False
            )
            runtime._load_csv(str(path), format=form)
            x, target = batch(MICROBATCHES)
            last = schedule.num_stages - 1
            runtime.step(*((x,) if 0 in own else ()), **({"target": target} if last in own else {}))
            require_serial_gradients(own, schedule)
            done.append(f"{schedule.name} {form}")
    return done


@pytest.mark.processes
def test_our_schedules_run_in_pytorchs_runtime_with_the_gradients_of_a_serial_run(
    tmp_path: Path,
) -> None:
    done = run_processes(run_in_pytorch, 2, tmp_path, timeout_s=200.0)
    assert done[0] == done[1]
    assert len(done[0]) == 10


@pytest.mark.parametrize(
    ("name", "chunks", "microbatches"),
    [
        ("Interleaved1F1B", 2, 4),
        ("LoopedBFS", 2, 4),
        ("InterleavedZeroBubble", 2, 4),
        ("ZBVZeroBubble", 2, 4),
        ("DualPipeV", 2, 6),
    ],
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_schedules_of_pytorch_run_in_our_executor_with_the_gradients_of_a_serial_run(
    name: str, chunks: int, microbatches: int, form: str, tmp_path: Path
) -> None:
    schedule = from_csv(table_of(name, 2, chunks, microbatches, form, tmp_path))
    # PyTorch gathers the weights of every stage; these stages have theirs whole.
    moves = (Kind.GATHER, Kind.RELEASE)
    schedule = attrs.evolve(
        schedule, actions=[rows[~np.isin(rows[:, 0], moves)] for rows in schedule.actions]
    )
    x, target = (part.split(2) for part in batch(microbatches))
    last = schedule.num_stages - 1

    def inputs(stage: int, microbatch: int) -> dict[str, Any]:
        values = {"input": x[microbatch]} if stage == 0 else {}
        return values | ({"target": target[microbatch]} if stage == last else {})

    def train(comm: Communicator) -> float:
        own = {stage: stage_module(stage) for stage in schedule.stages_of(comm.rank)}
        executor = PipelineExecutor(schedule, own, comm, loss=squares)
        loss = executor.step(inputs, divisor=1.0).loss_sum
        require_serial_gradients(own, schedule)
        return float(loss)

    losses = LocalWorld(2).run(train)
    assert math.isfinite(max(losses))
