"""Held-out loss and generated text do not depend on the layout."""

from __future__ import annotations

import functools
import math

import attrs
import pytest

from tests.serial import GROUPED, settings, text
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.data.reader import evenly_spaced
from trainwright.integration.evaluation import evaluate
from trainwright.integration.generation import generate
from trainwright.integration.parts import assemble

SHAPE = attrs.evolve(GROUPED, layers=3)


@functools.cache
def outcome(config: RunConfig) -> tuple[float, bytes]:
    """Return the held-out loss and a sample of an untrained model; all ranks have the same."""

    def work(world: Communicator) -> tuple[float, bytes]:
        parts = assemble(config, world, text(), SHAPE)
        tokens, labels = evenly_spaced(text().held_out, config.batch.sequence_length, 5)
        labels[2, 3:9] = -100
        return evaluate(parts, tokens, labels), generate(parts, b"Licensor", 12)

    results = set(LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work))
    assert len(results) == 1
    return results.pop()


@pytest.mark.parametrize(
    "layout",
    [
        {"layout": "cp=3"},
        {"layout": "cp=2,tp=2", "sequence_parallel": True},
        {"layout": "dp=2,cp=2,pp=2", "zero": 3, "microbatches": 3},
        {"layout": "dp=2,tp=2", "zero": 3},
    ],
    ids=lambda layout: layout["layout"],
)
def test_held_out_loss_and_generated_text_are_those_of_one_rank(layout: dict[str, object]) -> None:
    loss, sample = outcome(settings(dtype="float64"))

    found, generated = outcome(settings(dtype="float64", **layout))

    assert math.isclose(found, loss, rel_tol=1e-12)
    assert generated == sample
    assert len(sample) == 12
