"""Measures against logits that run away, and experts in balance: the same in every layout."""

from __future__ import annotations

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
from trainwright.integration.live_state import LiveState
from trainwright.integration.model import DecoderStage, ExpertShape
from trainwright.integration.model.decoder import build_stage
from trainwright.integration.model.initialize import initialize_
from trainwright.integration.model.layers import PlainLayers
from trainwright.integration.parts import Parts
from trainwright.integration.recipe import StepRecord
from trainwright.integration.training_state import restore_state, save_state
from trainwright.sharding import Routing, placements_of
from trainwright.stability_guards import HaltError, MemorySnapshots

STREAM = np.frombuffer(b"logits grow where nobody looks, and so do experts. " * 5, np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
DENSE = ModelShape(width=16, layers=2, heads=2, kv_heads=1, mlp_width=24)
SPARSE = attrs.evolve(DENSE, experts=ExpertShape(Routing(4, 2), width=8, shared_width=8))
MEASURES = {"z_loss": 0.05, "embedding_gradient": 0.25, "qk_norm": True}
RATE = 0.125

Held = dict[str, torch.Tensor]


def config(**leaves: Any) -> RunConfig:
    base = RunConfig.of(steps=3, global_batch=8, sequence_length=15, warmup=1, dtype="float64")
    return base.evolve(microbatches=2, lr=0.01, **leaves)


def run(
    world: Communicator, settings: RunConfig, shape: ModelShape
) -> tuple[list[StepRecord], Held, Held]:
    """Return what the steps did, and this rank's weights and biases at the end."""
    parts = assemble(settings, world, CORPUS, shape)
    records: list[StepRecord] = []
    train(parts, parts.start(), [records.append])
    return records, weights_of(parts), {n: b.clone() for n, b in parts.balance.biases().items()}


def weights_of(parts: Parts) -> Held:
    return {name: piece.parameter.detach().clone() for name, piece in parts.model.pieces.items()}


def plain_model(shape: ModelShape) -> torch.nn.Module:
    model = build_stage(shape, PlainLayers(), range(shape.layers), _in_turn).double()
    initialize_(model, placements_of(model), shape, seed=0)
    return model


def _in_turn(layers: Any, hidden: Any, *args: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden, *args)
    return hidden


def first_batch(settings: RunConfig) -> tuple[torch.Tensor, torch.Tensor]:
    def read(world: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        part = assemble(settings, world, CORPUS, DENSE).feed.next_batch().part
        return part.tokens_MBS.flatten(0, 1), part.labels_MBS.flatten(0, 1)

    return LocalWorld(1, timeout_s=60.0).run(read)[0]


def test_the_first_step_is_that_of_the_plain_loss_with_the_measures_written_out() -> None:
    settings = config(**MEASURES)
    model = plain_model(attrs.evolve(DENSE, qk_norm=True))
    tokens, labels = first_batch(config())

    logits = model(tokens_BS=tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten()) + 0.05 * logits.logsumexp(-1).square().mean()
    loss.backward()
    model.model["embed_tokens"].weight.grad *= 0.25
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    ((records, _, _),) = LocalWorld(1, timeout_s=60.0).run(run, settings, DENSE)

    assert records[0].loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert records[0].grad_norm == pytest.approx(float(norm), rel=1e-12)


def test_the_measures_are_the_same_over_tensor_and_pipeline_ranks() -> None:
    settings = config(**MEASURES)

    ((alone, _, _),) = LocalWorld(1, timeout_s=60.0).run(run, settings, DENSE)
    parallel = LocalWorld(4, timeout_s=60.0).run(run, settings.evolve(layout="tp=2,pp=2"), DENSE)

    for records, _, _ in parallel:
        for found, right in zip(records, alone, strict=True):
            assert found.loss == pytest.approx(right.loss, rel=1e-10)
            assert found.grad_norm == pytest.approx(right.grad_norm, rel=1e-9)


def test_biases_move_against_the_choices_of_all_ranks_and_resume_in_any_layout() -> None:
    settings = config(expert_bias=RATE)
    files = CrashingFiles()

    def work(world: Communicator, settings: RunConfig, steps: int, save: bool) -> Held:
        parts = assemble(settings, world, CORPUS, SPARSE)
        place = parts.mesh.coordinates
        store = StateStore(Path("/run"), world, coordinates=place, files=files)
        progress = (None if save else restore_state(store, parts)) or parts.start()
        train(attrs.evolve(parts, config=settings.evolve(steps=steps)), progress)
        if save:
            save_state(store, parts, progress)
        return {name: bias.clone() for name, bias in parts.balance.biases().items()}

    def biases(layout: str, steps: int, save: bool = False) -> Held:
        chosen = settings.evolve(layout=layout)
        size = chosen.parallel.mesh.world_size
        found = LocalWorld(size, timeout_s=60.0).run(work, chosen, steps, save)
        return {name: bias for rank in found for name, bias in rank.items()}

    once = biases("dp=1", 1, save=True)
    resumed = biases("dp=2,pp=2,ep=2", 3)
    ((_, _, right),) = LocalWorld(1, timeout_s=60.0).run(run, settings, SPARSE)

    model = plain_model(SPARSE)
    chosen: dict[str, torch.Tensor] = {}
    for number in ("0", "1"):
        experts = model.model["layers"][number].mlp
        experts.gate.register_forward_hook(
            lambda _, __, out, number=number: chosen.__setitem__(number, out.topk(2, -1).indices)
        )
    model(tokens_BS=first_batch(config())[0])
    for number, experts_of in chosen.items():
        counts = torch.bincount(experts_of.flatten(), minlength=4).double()
        moved = RATE * (counts.mean() - counts).sign()
        name = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        assert torch.equal(once[name], moved)
    assert resumed.keys() == right.keys() == once.keys()
    for name, bias in right.items():
        assert torch.equal(resumed[name], bias), name


def test_a_step_that_is_skipped_moves_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = DecoderStage.loss
    monkeypatch.setattr(
        DecoderStage,
        "loss",
        lambda stage, logits, **given: loss(stage, logits, **given) * torch.nan,
    )

    def work(world: Communicator) -> tuple[list[StepRecord], Held]:
        parts = assemble(config(expert_bias=RATE, steps=2), world, CORPUS, SPARSE)
        records: list[StepRecord] = []
        with pytest.raises(HaltError, match="in a row"):
            train(parts, parts.start(), [records.append])
        return records, parts.balance.biases()

    ((records, biases),) = LocalWorld(1, timeout_s=60.0).run(work)

    assert {record.verdict.name for record in records[:-1]} == {"SKIP"}
    assert all(not bias.any() for bias in biases.values())


def test_going_back_puts_the_biases_back() -> None:
    settings = config(expert_bias=RATE, steps=2)

    def work(world: Communicator) -> tuple[Held, Held, Held]:
        parts = assemble(settings, world, CORPUS, SPARSE)
        progress = parts.start()

        def biases() -> Held:
            return {name: bias.clone() for name, bias in parts.balance.biases().items()}

        train(attrs.evolve(parts, config=settings.evolve(steps=1)), progress)
        snapshots = MemorySnapshots({"run": LiveState(parts, progress)})
        snapshots.take(1)
        before = biases()
        train(parts, progress)
        after = biases()
        snapshots.restore(1)
        return before, after, biases()

    ((before, after, back),) = LocalWorld(1, timeout_s=60.0).run(work)

    assert any(not torch.equal(after[name], bias) for name, bias in before.items())
    for name, bias in before.items():
        assert torch.equal(back[name], bias)


def test_measures_that_a_model_has_no_use_for_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--expert-bias 0.001 balances experts, of which model"):
        _ = RunConfig.of(expert_bias=0.001).model.shape
    with pytest.raises(ConfigError, match=r"--embedding-gradient must be from 0 to 1, got 1.5"):
        RunConfig.of(embedding_gradient=1.5)
    assert RunConfig.of(qk_norm=True, z_loss=1e-4).model.shape.qk_norm
