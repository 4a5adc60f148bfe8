"""Held-out loss and generated text do not depend on the layout."""

from __future__ import annotations

import functools
import math

import attrs
import pytest
import torch

from tests.serial import GROUPED, settings, text
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.evaluation import evaluate
from trainwright.integration.generation import generate
from trainwright.integration.parts import assemble

SHAPE = attrs.evolve(GROUPED, layers=3)


@functools.cache
def outcome(config: RunConfig) -> tuple[float, float, float, bytes]:
    """Return what an untrained model says, the same on all ranks.

    That is the loss of some sequences; that of two documents in one sequence, and in one each; and
    a sample of text.
    """

    def work(world: Communicator) -> tuple[float, float, float, bytes]:
        parts = assemble(config, world, text(), SHAPE)
        rows = text().held_out_rows(config.batch.sequence_length, 5)
        tokens, labels = rows.tokens_NS, rows.labels_NS
        labels[2, 3:9] = -100
        packed = torch.tensor([[0] * 7 + [1] * 8 + [-1] * 2])
        first, second = tokens[:1].clone(), tokens[:1].roll(-7, 1)
        in_first, in_second = labels[:1].clone(), labels[:1].roll(-7, 1)
        in_first[:, 6:] = in_second[:, 7:] = -100
        in_one = torch.where(torch.arange(17) < 6, labels[:1], in_second.roll(7, 1))
        in_one[:, 6] = -100
        return (
            evaluate(parts, tokens, labels),
            evaluate(parts, tokens[:1], in_one, packed),
            evaluate(parts, torch.cat((first, second)), torch.cat((in_first, in_second))),
            generate(parts, b"Licensor", 12),
        )

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
    loss, packed, apart, sample = outcome(settings(dtype="float64"))

    found, found_packed, found_apart, generated = outcome(settings(dtype="float64", **layout))

    assert math.isclose(found, loss, rel_tol=1e-12)
    assert math.isclose(found_packed, packed, rel_tol=1e-12)
    assert math.isclose(found_apart, packed, rel_tol=1e-12)
    assert math.isclose(apart, packed, rel_tol=1e-12)
    assert generated == sample
    assert len(sample) == 12
