"""A loss is a sum over tokens, divided once by the valid tokens of the global batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.config import RunConfig
from trainwright.integration.data import Corpus, Reader
from trainwright.integration.data import protocol as rows_of
from trainwright.integration.evaluation import evaluate
from trainwright.integration.feed import Feed
from trainwright.integration.generation import generate
from trainwright.integration.model import DecoderStage, ModelShape
from trainwright.integration.parts import Parts, assemble
from trainwright.integration.recipe import Observer, StepRecord, train
from trainwright.integration.sharded import sequence_part
from trainwright.stability_guards import Verdict

IGNORE = -100
LENGTH = 4
SHAPE = ModelShape(width=8, layers=4, heads=2, kv_heads=2, mlp_width=8)
BYTES = np.arange(200, dtype=np.uint8)

Losses = Sequence[Sequence[int]]
"""Of each sample the losses of its valid tokens."""

FOUR: Losses = [[4], [1, 1, 2], [3, 3], [2]]

LAYOUTS = [
    {"layout": "dp=1", "microbatches": 1},
    {"layout": "dp=1", "microbatches": 4},
    {"layout": "dp=2", "microbatches": 2, "zero": 2, "reduce": "microbatch"},
    {"layout": "cp=2,pp=2", "microbatches": 2},
]
MORE = [
    {"layout": "dp=1", "microbatches": 2},
    {"layout": "dp=2", "microbatches": 1},
    # Where hooks gather them, a loss finds no weights.
    {"layout": "dp=4", "microbatches": 1, "zero": 3, "gather": "step"},
    {"layout": "cp=2,tp=2", "microbatches": 2},
    {"layout": "dp=2,pp=2", "microbatches": 2, "zero": 1},
]


class Samples:
    """Samples whose labels are the losses that `loss_as_labelled` makes of them."""

    def __init__(self, losses: Losses) -> None:
        self.losses = losses

    def sample(self, position: int) -> rows_of.Sequence:
        """Return a sample; they come again and again."""
        losses = self.losses[position % len(self.losses)]
        padding = [0] * (LENGTH - len(losses))
        counts = [False] + [True] * len(losses) + [False] * len(padding)
        return rows_of.Sequence(np.array([0, *losses, *padding]), None, np.array(counts))


def loss_as_labelled(
    self: DecoderStage, logits_BSV: torch.Tensor, *, labels_BS: torch.Tensor, **_: torch.Tensor
) -> torch.Tensor:
    """Return the sum of the labels; so large is also the gradient of a weight, while that is 1."""
    weight = self.model["norm"].get_parameter("weight")[0]
    return labels_BS.clamp(min=0).sum() * (weight / weight.detach()) + 0 * logits_BSV.sum()


def settings(**changes: object) -> RunConfig:
    base: dict[str, Any] = {
        "steps": 1,
        "global_batch": 4,
        "microbatches": 1,
        "sequence_length": LENGTH,
        "dtype": "float64",
        "warmup": 0,
    }
    return RunConfig.of(**{**base, **changes})


def on_each_rank(config: RunConfig, work: Callable[[Parts], Any]) -> list[Any]:
    corpus = Corpus(train=BYTES, held_out=BYTES, files=1, skipped=(), source="bytes")

    def on_rank(world: Communicator) -> Any:
        return work(assemble(config, world, corpus, SHAPE))

    return LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(on_rank)


def on_ranks(config: RunConfig, work: Callable[[Parts], Any]) -> Any:
    """Do the same on every rank, and return what all of them return."""
    results = on_each_rank(config, work)
    assert all(result == results[0] for result in results), results
    return results[0]


def records_of(
    parts: Parts, losses: Losses, batch: int, microbatches: int, *observers: Observer
) -> list[StepRecord]:
    """Train with the recipe on these samples; return its records but for durations."""
    reader = Reader(
        Samples(losses),
        batch,
        microbatches=microbatches,
        data_rank=parts.mesh.coordinate("dp"),
        data_size=parts.mesh.size("dp"),
    )
    part = sequence_part(parts.config, parts.mesh)
    feed = Feed(reader, parts.mesh.communicator("dp", "cp"), part)
    records: list[StepRecord] = []
    train(attrs.evolve(parts, feed=feed), parts.start(), [records.append, *observers])
    return [attrs.evolve(record, seconds=0.0) for record in records]


def trained(losses: Losses, batch: int | None = None, **changes: Any) -> list[StepRecord]:
    """Return the records of a run that makes steps of ``batch`` samples, all by default."""
    batch = batch or len(losses)
    config = settings(global_batch=batch, **changes)
    microbatches = changes.get("microbatches", 1)
    found: list[StepRecord] = on_ranks(
        config, lambda parts: records_of(parts, losses, batch, microbatches)
    )
    return found


@pytest.fixture
def labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecoderStage, "loss", loss_as_labelled)


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.long) for layout in MORE)],
    ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_every_token_weighs_the_same_however_samples_are_shared_out(layout: dict[str, Any]) -> None:
    means = {
        ((4,), (1, 1, 2), (3, 3), (2,)): 16 / 7,
        ((4,), (1, 1, 2), (), ()): 2.0,
        ((1, 1, 1), (1,), (1, 1), ()): 1.0,
        ((2, 2, 2), (2,), (2, 2), ()): 2.0,
    }
    batches = [losses for batch in means for losses in batch]

    # So small a rate that the weight whose gradient is looked at stays 1.
    records = trained(batches, 4, steps=len(means), lr=1e-13, **layout)

    for record, (batch, mean) in zip(records, means.items(), strict=True):
        assert record.loss == mean
        assert math.isclose(record.grad_norm, mean, rel_tol=1e-12)
        assert record.tokens == sum(map(len, batch))


@pytest.mark.usefixtures("labelled")
def test_samples_that_fill_no_batch_are_read_with_those_of_the_next_epoch() -> None:
    losses = [[4], [1, 1, 2], [3, 3], [2], [5, 1], [1]]

    records = trained(losses, 4, steps=3, microbatches=2)

    assert [record.tokens for record in records] == [7, 7, 6]
    total = sum(record.loss * record.tokens for record in records)
    assert math.isclose(total, 2 * sum(map(sum, losses)), rel_tol=1e-15)


@pytest.mark.parametrize("guards", ["default", "none"])
def test_a_batch_without_any_valid_token_is_skipped_and_leaves_no_trace(guards: str) -> None:
    layout = {"layout": "dp=2,pp=2", "microbatches": 2, "zero": 3, "guards": guards}
    empty, first, second = [[]] * 4, [[4], [1, 1, 2], [3], []], [[2], [1, 5], [], [1]]

    def ends(losses: Losses) -> Any:
        def work(parts: Parts) -> Any:
            records = records_of(parts, losses, 4, 2)
            state = parts.optimizer.state_dict()["state"].values()
            moments = [moment.tolist() for each in state for moment in each.values()]
            weights = [piece.parameter.tolist() for piece in parts.model.pieces.values()]
            return records, (moments, weights)

        return on_each_rank(settings(steps=2, **layout), work)

    among_empty = ends([*empty, *first, *empty, *second])
    alone = ends([*first, *second])

    for (records, state), (wanted, other) in zip(among_empty, alone, strict=True):
        for record in records[::2]:
            assert (record.verdict, record.tokens, record.lr) == (Verdict.SKIP, 0, 0.0)
            assert (record.loss, record.grad_norm) == (0.0, 0.0)
        for record, right in zip(records[1::2], wanted, strict=True):
            assert attrs.evolve(record, step=right.step, end=right.end) == right
        assert state == other


@pytest.mark.usefixtures("labelled")
@pytest.mark.parametrize("ranks", [1, 3, 4, pytest.param(2, marks=pytest.mark.long)])
def test_each_held_out_sample_counts_once_on_any_number_of_ranks(ranks: int) -> None:
    config = settings(layout=f"dp={ranks}", global_batch=12 // (1 + ranks % 2), microbatches=1)

    def work(parts: Parts) -> tuple[float, float]:
        labels = torch.arange(10)[:, None].expand(10, LENGTH)
        tokens = torch.zeros_like(labels)
        return evaluate(parts, tokens, labels), evaluate(parts, tokens[:2], labels[:2])

    assert on_ranks(config, work) == (4.5, 0.5)


@pytest.mark.parametrize(
    "layout",
    [
        {"layout": "dp=2", "zero": 3},
        pytest.param(
            {"layout": "dp=2,pp=2", "zero": 1, "schedule": "zb-v"}, marks=pytest.mark.long
        ),
    ],
    ids=lambda layout: layout["layout"],
)
def test_evaluating_and_generating_between_steps_change_nothing(layout: dict[str, Any]) -> None:
    config = settings(steps=2, microbatches=2, **layout)
    tokens = torch.arange(5 * LENGTH).view(5, LENGTH)

    def look(parts: Parts, times: int) -> Any:
        return [evaluate(parts, tokens, tokens) for _ in range(times)], generate(parts, b"ab", 2)

    def train_only(parts: Parts) -> Any:
        return records_of(parts, FOUR, 4, 2), look(parts, 1)

    def look_often(parts: Parts) -> Any:
        look(parts, 1)
        records = records_of(parts, FOUR, 4, 2, lambda _: look(parts, 3))
        return records, look(parts, 1)

    assert on_ranks(config, look_often) == on_ranks(config, train_only)
