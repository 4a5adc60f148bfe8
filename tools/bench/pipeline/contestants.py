"""The same layers under the same schedule: our executor, and PyTorch's runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import nn

from trainwright.collectives import Communicator
from trainwright.pipeline_schedules import GENERATORS, Schedule, to_csv
from trainwright.pipeline_schedules.execute import BoundarySpec, PipelineExecutor, TensorSpec


@attrs.frozen
class Job:
    """What is run.

    Args:
        schedule: The generator's name.
        ranks: Processes.
        microbatches: Of a step.
        width: Of every layer.
        rows: Of a microbatch.
        layers: In all; dealt out to the stages.
    """

    schedule: str
    ranks: int = 2
    microbatches: int = 8
    width: int = 32
    rows: int = 4
    layers: int = 4

    def make(self) -> Schedule:
        """The schedule, of one or two chunks a rank."""
        return GENERATORS[self.schedule].make(self.ranks, self.microbatches)

    def stages(self, numbers: tuple[int, ...], num_stages: int) -> dict[int, nn.Module]:
        """Some of the stages, the same at each call."""
        per_stage = self.layers // num_stages
        return {number: self._stage(number, per_stage) for number in numbers}

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.microbatches * self.rows, self.width)
        x = torch.randn(shape, generator=generator)
        return x, torch.randn(shape, generator=generator)

    def _stage(self, number: int, per_stage: int) -> nn.Module:
        layers: list[nn.Module] = []
        generator = torch.Generator().manual_seed(number)
        for _ in range(per_stage):
            linear = nn.Linear(self.width, self.width)
            for parameter in linear.parameters():
                nn.init.normal_(parameter, std=self.width**-0.5, generator=generator)
            layers += [linear, nn.Tanh()]
        return nn.Sequential(*layers)


class Contestant(Protocol):
    """One way to run a step; one instance on each rank."""

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """This rank's stages."""
        ...

    def step(self) -> None:
        """Forward and backward of all microbatches; gradients are made anew."""
        ...


class Ours:
    """`PipelineExecutor`, boundaries declared."""

    def __init__(self, job: Job, comm: Communicator) -> None:
        schedule = job.make()
        self.stages = job.stages(schedule.stages_of(comm.rank), schedule.num_stages)
        spec = TensorSpec((job.rows, job.width), torch.float32)
        loss = nn.MSELoss(reduction="sum")
        self.executor = PipelineExecutor(
            schedule,
            self.stages,
            comm,
            loss=loss,
            boundary=BoundarySpec.uniform(schedule.num_stages, spec),
        )
        x, target = (torch.split(tensor, job.rows) for tensor in job.data())
        self._last = schedule.num_stages - 1
        self._x, self._target = x, target

    def inputs(self, stage: int, microbatch: int) -> dict[str, Any]:
        """What a stage and the loss are given."""
        values = {"input": self._x[microbatch]} if stage == 0 else {}
        return {**values, "target": self._target[microbatch]} if stage == self._last else values

    def step(self) -> None:
        """Run one step."""
        _forget_gradients(self.stages)
        self.executor.step(self.inputs, divisor=1.0)


class Theirs:
    """PyTorch's runtime, given the computations of the same schedule."""

    def __init__(self, job: Job, comm: Communicator) -> None:
        # Slow to import, and only the processes that run it need it.
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

        schedule = job.make()
        self.stages = job.stages(schedule.stages_of(comm.rank), schedule.num_stages)
        made = [
            PipelineStage(stage, number, schedule.num_stages, torch.device("cpu"))
            for number, stage in self.stages.items()
        ]
        self._runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            made, job.microbatches, loss_fn=nn.MSELoss(reduction="sum"), scale_grads=False
        )
        actions = {
            rank: [_Action.from_str(cell) for cell in line.split(",")]
            for rank, line in enumerate(to_csv(schedule).splitlines())
        }
        self._runtime._prepare_schedule_with_comms(actions)
        x, target = job.data()
        self._args = (x,) if 0 in self.stages else ()
        is_last = schedule.num_stages - 1 in self.stages
        self._kwargs: dict[str, Any] = {"target": target} if is_last else {}

    def step(self) -> None:
        """Run one step."""
        _forget_gradients(self.stages)
        self._runtime.step(*self._args, **self._kwargs, return_outputs=False)


def _forget_gradients(stages: Mapping[int, nn.Module]) -> None:
    for stage in stages.values():
        for parameter in stage.parameters():
            parameter.grad = None
