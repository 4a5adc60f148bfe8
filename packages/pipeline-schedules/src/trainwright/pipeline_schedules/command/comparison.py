"""All generators in one table."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trainwright.pipeline_schedules.costs import Costs
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.generators import GENERATORS, Generator
from trainwright.pipeline_schedules.memory import peak_memory
from trainwright.pipeline_schedules.simulate import simulate

_HEAD = ("schedule", "chunks", "makespan", "span", "bubble", "fraction", "held")
_NOTE = (
    "costs are those of a rank's stage, shared out among its chunks; bubble is over the ideal, "
    "fraction of the makespan; held is the most that a rank holds, in microbatches of its stage"
)


def comparison(ranks: int, microbatches: int, costs: Costs, chunks: int) -> str:
    """A line for each generator: time, bubbles, and what a rank holds at most.

    Args:
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of a step.
        costs: Of the stage of each rank; of several chunks each has its part.
        chunks: Chunks a rank of generators that leave it open.

    Raises:
        ScheduleError: Sizes below 1, or costs of several stages, which chunks cannot share.
    """
    _require_one_for_all(costs)
    lines: list[tuple[str, ...]] = [_HEAD]
    for generator in GENERATORS.values():
        lines.append(_line(generator, ranks, microbatches, costs, chunks))
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    rows = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    return "\n".join([f"{ranks} ranks, {microbatches} microbatches", *rows, _NOTE])


def _require_one_for_all(costs: Costs) -> None:
    for field in attrs.fields(Costs):
        if isinstance(getattr(costs, field.name), tuple):
            raise ScheduleError(
                f"generators with different numbers of stages need one {field.name} for all "
                f"stages, got {len(getattr(costs, field.name))}"
            )


def _line(
    generator: Generator, ranks: int, microbatches: int, costs: Costs, chunks: int
) -> tuple[str, ...]:
    number = generator.chunks or chunks
    schedule = generator.make(ranks, microbatches, number)
    run = simulate(schedule, _shared(costs, number))
    held = float(np.max(peak_memory(schedule))) / number
    if schedule.forward_only:
        held = 0.0
    return (
        generator.name,
        str(number),
        f"{run.makespan:g}",
        f"{run.span:g}",
        f"{run.bubble:.4f}",
        f"{run.bubble_fraction:.4f}",
        f"{held:g}",
    )


def _shared(costs: Costs, chunks: int) -> Costs:
    def part(value: float | Sequence[float] | None) -> float | None:
        assert not isinstance(value, Sequence), "costs are one number for all stages"
        return None if value is None else value / chunks

    return attrs.evolve(
        costs,
        forward=part(costs.forward) or 0.0,
        input_gradient=part(costs.input_gradient) or 0.0,
        weight_gradient=part(costs.weight_gradient) or 0.0,
        backward=part(costs.backward),
        pair=part(costs.pair),
    )


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, numbers to the right."""
    first = line[0].ljust(widths[0])
    rest = zip(line[1:], widths[1:], strict=True)
    return [first, *(text.rjust(width) for text, width in rest)]
