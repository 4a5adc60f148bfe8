"""What sharded weights and gradients move in a training step is what the plan says."""

from __future__ import annotations

import pytest

from tests.serial import GROUPED, settings, text
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.parts import assemble
from trainwright.integration.recipe import train
from trainwright.sharding.data.testing import RecordedCall, RecordingCommunicator

MICROBATCHES = 3


@pytest.mark.parametrize(
    ("changes", "gathers", "reductions"),
    [
        ({"layout": "dp=2", "zero": 1}, 1, 1),
        ({"layout": "dp=2,pp=2", "zero": 2}, 1, 1),
        ({"layout": "dp=2,pp=2", "zero": 2, "reduce": "microbatch"}, 1, MICROBATCHES),
        ({"layout": "dp=2,pp=2", "zero": 3}, 1, 1),
        ({"layout": "dp=2,pp=2", "zero": 3, "gather": "action"}, 2 * MICROBATCHES, 1),
        ({"layout": "dp=2,pp=2", "zero": 3, "gather": "unit"}, 2 * MICROBATCHES, 1),
        ({"layout": "dp=2,pp=2", "zero": 3, "reduce": "microbatch"}, 1, MICROBATCHES),
        (
            {"layout": "dp=2,pp=2", "zero": 3, "gather": "unit", "reduce": "microbatch"},
            2 * MICROBATCHES,
            MICROBATCHES,
        ),
        ({"layout": "dp=2", "zero": 3}, 2 * MICROBATCHES, 1),
        ({"layout": "dp=2", "zero": 3, "gather": "step"}, 1, 1),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_step_gathers_and_reduces_each_weight_as_often_as_planned(
    changes: dict[str, object], gathers: int, reductions: int
) -> None:
    config = settings(microbatches=MICROBATCHES, steps=3, warmup=1, **changes)

    def work(world: Communicator) -> tuple[int, list[int], list[int]]:
        calls: list[RecordedCall] = []
        parts = assemble(config, RecordingCommunicator(world, calls), text(), GROUPED)
        ends: list[int] = []
        train(parts, parts.start(), [lambda _: ends.append(len(calls))])
        # The second step: the first one learns in which order units are needed.
        step = calls[ends[0] : ends[1]]
        whole = sum(group.numel for group in parts.model.layout)
        return whole, _elements(step, "all_gather"), _elements(step, "reduce_scatter")

    for whole, gathered, reduced in LocalWorld(config.parallel.mesh.world_size).run(work):
        assert sum(gathered) == gathers * whole
        assert sum(reduced) == reductions * whole


def _elements(calls: list[RecordedCall], operation: str) -> list[int]:
    # Counts and agreements are whole numbers.
    return [c.numel for c in calls if c.operation == operation and c.dtype.is_floating_point]
