"""Batches that grow: a ramped run computes what a serial loop over the same sizes computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainwright.checkpointing.state import StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import Corpus, ModelShape, RunConfig, assemble, train
from trainwright.integration.errors import ConfigError
from trainwright.integration.feed import GlobalBatch
from trainwright.integration.fitting import check_fits
from trainwright.integration.flops import Spans
from trainwright.integration.model import DecoderStage
from trainwright.integration.model.decoder import build_stage
from trainwright.integration.model.initialize import initialize_
from trainwright.integration.model.layers import PlainLayers
from trainwright.integration.ramping import microbatch_counts
from trainwright.integration.recipe import StepRecord
from trainwright.integration.training_state import restore_state, save_state
from trainwright.sharding import placements_of
from trainwright.stability_guards import Verdict

STREAM = np.frombuffer(b"a batch grows when what was read before has taught enough. " * 9, np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
SHAPE = ModelShape(width=16, layers=2, heads=2, kv_heads=1, mlp_width=24)
SIZES = [4, 4, 4, 8, 8, 12]
RAMP = {"global_batch": 12, "micro_batch": 2, "ramp_from": 4, "ramp_by": 4, "ramp_over": 24}


def config(**leaves: Any) -> RunConfig:
    base = RunConfig.of(steps=6, sequence_length=15, warmup=2, lr=0.01, dtype="float64", **RAMP)
    return base.evolve(**leaves)


def run(world: Communicator, settings: RunConfig) -> tuple[list[StepRecord], int]:
    """Return what the steps did, and the position behind them."""
    parts = assemble(settings, world, CORPUS, SHAPE)
    records: list[StepRecord] = []
    train(parts, parts.start(), [records.append])
    return records, parts.feed.position


def serial_losses(settings: RunConfig, sizes: list[int]) -> list[float]:
    """Return the losses of a plain loop over batches of these sizes."""
    model = build_stage(SHAPE, PlainLayers(), range(SHAPE.layers), _in_turn).double()
    initialize_(model, placements_of(model), SHAPE, settings.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    samples = CORPUS.samples(15, settings.seed)
    losses = []
    for update, size in enumerate(sizes):
        first = sum(sizes[:update])
        rows = [samples.sample(first + place).tokens for place in range(size)]
        sequences = torch.from_numpy(np.stack(rows).astype(np.int64))
        logits = model(tokens_BS=sequences[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, sequences[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            share = 0.5 * (1 + math.cos(math.pi * (update - 2) / 4))
            group["lr"] = 0.01 * ((update + 1) / 2 if update < 2 else 0.1 + 0.9 * share)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _in_turn(layers: Any, hidden: Any, *args: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden, *args)
    return hidden


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,pp=2"])
def test_a_ramped_run_makes_the_steps_of_a_serial_loop_over_the_same_sizes(layout: str) -> None:
    settings = config(layout=layout)

    ranks = LocalWorld(settings.parallel.mesh.world_size, timeout_s=60.0).run(run, settings)

    right = serial_losses(settings, SIZES)
    for records, position in ranks:
        assert [record.tokens for record in records] == [15 * size for size in SIZES]
        assert [record.spans for record in records] == [
            Spans(15 * size, 15 * 15 * size) for size in SIZES
        ]
        assert [record.loss for record in records] == pytest.approx(right, rel=1e-9)
        assert position == sum(SIZES)


def test_a_ramp_resumes_in_its_middle_in_another_layout() -> None:
    files = CrashingFiles()

    def work(world: Communicator, settings: RunConfig, steps: int) -> list[StepRecord]:
        parts = assemble(settings, world, CORPUS, SHAPE)
        place = parts.mesh.coordinates
        store = StateStore(Path("/run"), world, coordinates=place, files=files)
        progress = restore_state(store, parts) or parts.start()
        records: list[StepRecord] = []
        train(attrs.evolve(parts, config=settings.evolve(steps=steps)), progress, [records.append])
        save_state(store, parts, progress)
        return records

    (before,) = LocalWorld(1, timeout_s=60.0).run(work, config(), 3)
    after, _ = LocalWorld(2, timeout_s=60.0).run(work, config(layout="dp=2", zero=1), 6)

    losses = [record.loss for record in [*before, *after]]
    assert losses == pytest.approx(serial_losses(config(), SIZES), rel=1e-9)


@pytest.mark.parametrize("bad", [2, 3])
def test_a_skipped_batch_does_not_move_the_ramp_on(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_of_bad = sum(SIZES[:bad])
    inputs, loss = GlobalBatch.inputs, DecoderStage.loss

    def poisoned(batch: GlobalBatch, stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        is_bad = batch.part.positions.spans[0][0] == first_of_bad
        factor = torch.tensor(math.nan if is_bad else 1.0)
        return {**inputs(batch, stage, microbatch), "factor": factor}

    def breaking(stage: DecoderStage, logits: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return loss(stage, logits, **given) * given["factor"]

    monkeypatch.setattr(GlobalBatch, "inputs", poisoned)
    monkeypatch.setattr(DecoderStage, "loss", breaking)

    ranks = LocalWorld(2, timeout_s=60.0).run(run, config(layout="dp=2"))

    right = [*SIZES[: bad + 1], *SIZES[bad:]]
    for records, _ in ranks:
        assert records[bad].verdict is Verdict.SKIP
        assert [record.tokens for record in records] == [15 * size for size in right]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"ramp_over": None}, "--ramp-from 4 and --ramp-over None belong together"),
        ({"ramp_from": None, "ramp_over": None}, "--ramp-by 4 has no effect without"),
        ({"ramp_from": 5}, r"--ramp-from 5 must be a multiple of dp \* micro_batch = 2; 6 works"),
        ({"ramp_from": 2}, "last - first must be a multiple of increment=4"),
        ({"ramp_from": 24, "ramp_by": None}, "last must be at least first=24"),
    ],
)
def test_ramps_that_do_not_fit_are_refused_before_a_step(
    leaves: dict[str, Any], message: str
) -> None:
    def check() -> None:
        settings = config(**leaves)
        check_fits(SHAPE, settings)

    with pytest.raises(ConfigError, match=message):
        check()


def test_without_an_increment_batches_grow_by_what_data_ranks_can_share_out() -> None:
    settings = config(layout="dp=2", ramp_by=None)

    assert microbatch_counts(settings) == (1, 2, 3)
    assert microbatch_counts(config(ramp_by=None)) == (2, 3, 4, 5, 6)
