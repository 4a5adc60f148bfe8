"""What a stage may return besides its boundary: losses of its own, and tensors for later stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.pipeline_schedules import GENERATORS, Schedule, gpipe, one_f_one_b
from trainwright.pipeline_schedules.execute import (
    BoundaryError,
    BoundarySpec,
    PipelineError,
    PipelineExecutor,
    Skip,
    StageOutput,
    TensorSpec,
)
from trainwright.pipeline_schedules.execute.boundary import Crossing, Form
from trainwright.pipeline_schedules.execute.header import decode, encode
from trainwright.pipeline_schedules.execute.testing import serial_step

WIDTH = 3
ROWS = 2
F64 = torch.float64


class Part(nn.Module):
    """A linear layer that may start skips, take them, and have a loss of its own."""

    def __init__(self, stage: int, starts: Sequence[str] = (), losses: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=F64)
        generator = torch.Generator().manual_seed(stage)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.starts = starts
        self.losses = losses
        self.seen: set[str] = set()

    def forward(
        self, hidden: torch.Tensor | None = None, *, x: Any = None, **skips: torch.Tensor
    ) -> Any:
        start = hidden if x is None else x
        assert start is not None
        self.seen |= set(skips)
        product = torch.tanh(self.linear(start))
        for number, skip in enumerate(skips.values()):
            product = product + (2 + number) * skip
        if not self.starts and not self.losses:
            return product
        losses = {"balance": (product**2).sum(), "z": product.sum()} if self.losses else {}
        skips = {name: product * (3 + number) for number, name in enumerate(self.starts)}
        return StageOutput(product, losses=losses, skips=skips)


def cubes(output: torch.Tensor) -> torch.Tensor:
    return (output**3).sum()


def inputs(stage: int, microbatch: int) -> Mapping[str, Any]:
    if stage > 0:
        return {}
    generator = torch.Generator().manual_seed(microbatch)
    return {"x": torch.randn(ROWS, WIDTH, generator=generator, dtype=F64)}


SKIPS = (Skip("long", 0, 3), Skip("near", 1, 2), Skip("crossing", 1, 3))


def parts(losses: bool) -> list[Part]:
    starts = [[s.name for s in SKIPS if s.source == stage] for stage in range(4)]
    return [Part(stage, starts[stage], losses and stage != 2) for stage in range(4)]


def gradients_of(stage: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in stage.parameters()]


def run(
    schedule: Schedule, losses: bool, **options: Any
) -> tuple[list[dict[str, float]], list[dict[int, list[torch.Tensor | None]]]]:
    """A step: the further losses of each rank, and its gradients."""

    def on_rank(comm: Communicator) -> Any:
        made = parts(losses)
        stages = {stage: made[stage] for stage in schedule.stages_of(comm.rank)}
        executor = PipelineExecutor(schedule, stages, comm, loss=cubes, **options)
        result = executor.step(inputs, divisor=4.0, loss_scale=8.0)
        further = {name: float(value) for name, value in result.losses.items()}
        for number, stage in stages.items():
            # Stages in between are given nothing.
            assert stage.seen == {skip.name for skip in SKIPS if skip.target == number}
        return further, {number: gradients_of(stage) for number, stage in stages.items()}

    outcomes = LocalWorld(schedule.num_ranks, timeout_s=10.0).run(on_rank)
    return [further for further, _ in outcomes], [gradients for _, gradients in outcomes]


def serial(losses: bool, microbatches: int) -> list[Part]:
    stages = parts(losses)
    serial_step(stages, inputs, cubes, microbatches, divisor=4.0, loss_scale=8.0, skips=SKIPS)
    return stages


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(("name", "ranks", "chunks"), [("1f1b", 4, 1), ("zb-v", 2, 2)])
def test_skips_pass_stages_and_their_gradients_come_back(
    name: str, ranks: int, chunks: int, declared: bool
) -> None:
    spec = TensorSpec((ROWS, WIDTH), F64)
    skips = [Skip(s.name, s.source, s.target, spec if declared else None) for s in SKIPS]
    boundary = BoundarySpec.uniform(4, spec, skips) if declared else BoundarySpec(skips=skips)

    _, seen = run(GENERATORS[name].make(ranks, 3, chunks), losses=True, boundary=boundary)

    right = serial(losses=True, microbatches=3)
    for stages in seen:
        for number, gradients in stages.items():
            torch.testing.assert_close(
                gradients, gradients_of(right[number]), rtol=1e-12, atol=1e-12
            )


def test_further_losses_are_seeded_like_the_loss_and_summed_by_name_on_their_ranks() -> None:
    further, _ = run(one_f_one_b(4, 3), losses=True, boundary=BoundarySpec(skips=SKIPS))

    assert [sorted(losses) for losses in further] == [["balance", "z"]] * 2 + [[], ["balance", "z"]]
    stage = Part(0)
    outputs = [stage(**inputs(0, microbatch)).detach() for microbatch in range(3)]
    assert further[0]["z"] == pytest.approx(sum(float(o.sum()) for o in outputs), rel=1e-12)


def test_a_further_loss_that_is_no_sum_is_refused_by_name() -> None:
    class Mean(Part):
        def forward(self, x: torch.Tensor) -> StageOutput:
            return StageOutput(x, losses={"router": x.sum(0)})

    executor = PipelineExecutor(gpipe(1, 1), {0: Mean(0)}, SingleCommunicator(), loss=cubes)

    with pytest.raises(PipelineError, match=r"loss router must return the sum .* shape \[3\]"):
        executor.step(inputs, divisor=1.0)


def test_skips_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(BoundaryError, match="skip a must lead from a stage to a later one"):
        Skip("a", 2, 2)
    with pytest.raises(BoundaryError, match="each skip needs a name of its own"):
        BoundarySpec(skips=[Skip("a", 0, 2), Skip("a", 1, 2)])
    with pytest.raises(BoundaryError, match="skip a, which crosses it, needs a spec as well"):
        BoundarySpec.uniform(3, TensorSpec((1,), F64), [Skip("a", 0, 2)])
    with pytest.raises(PipelineError, match="skip a ends at stage 2, but the schedule has stages"):
        PipelineExecutor(
            gpipe(1, 1),
            {0: Part(0)},
            SingleCommunicator(),
            loss=cubes,
            boundary=BoundarySpec(skips=[Skip("a", 0, 2)]),
        )


@pytest.mark.parametrize("starts", [[], ["other"]])
def test_a_stage_must_return_the_skips_that_start_in_it_and_no_others(starts: list[str]) -> None:
    boundary = BoundarySpec(skips=[Skip("long", 0, 1)] if not starts else [])

    def on_rank(comm: Communicator) -> None:
        stages = {comm.rank: Part(comm.rank, starts if comm.rank == 0 else [])}
        executor = PipelineExecutor(gpipe(2, 1), stages, comm, loss=cubes, boundary=boundary)
        executor.step(inputs, divisor=1.0)

    with pytest.raises(BoundaryError, match="stage 0 must return the skips"):
        LocalWorld(2, timeout_s=10.0).run(on_rank)


def test_a_header_knows_skips() -> None:
    spec = TensorSpec((2, 3), F64)
    for form in (
        Form("tensor", skips=("a", "longer than eight")),
        Form("dict", ("k",), ("s", "t")),
    ):
        crossing = Crossing(form, (spec, spec, TensorSpec((), torch.int64)))

        assert decode(encode(crossing)) == crossing
        assert "skip" in str(crossing)
