"""Runs that go on by themselves: a poisoned batch leaves no trace, a flipped bit is found."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from tests.serial import SPARSE, settings, text
from trainwright.checkpointing.state import Retention, StateStore
from trainwright.checkpointing.testing.files import CrashingFiles
from trainwright.collectives import Communicator, LocalWorld
from trainwright.collectives.shm import SharedMemoryCommunicator
from trainwright.collectives.testing import run_processes
from trainwright.integration import recipe
from trainwright.integration.config import RunConfig
from trainwright.integration.feed import GlobalBatch
from trainwright.integration.model import DecoderStage, ModelShape
from trainwright.integration.model.blocks import Attention
from trainwright.integration.parts import Progress, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.replica_check import ReplicaCheck
from trainwright.integration.saver import Saver
from trainwright.integration.training_state import restore_state, save_state
from trainwright.stability_guards import HaltError, Intervention, MemoryJournal, Verdict

SHAPE = attrs.evolve(SPARSE, layers=2, experts=None, mlp_width=48)
MIXED = attrs.evolve(SPARSE, layers=2)
BATCH = 24
BAD = 9
UPDATES = 13
SPIKES = {
    "guards": {
        "non-finite": {},
        "joint-spike": {"min_history": 6, "evidence": 60, "escalate": {"skips": 0}},
    },
    "recovery": {"snapshot_every": 4, "skip_before": 0},
}


RankEnd = tuple[dict[str, torch.Tensor], tuple[Intervention, ...], list[StepRecord]]
"""Weights, interventions and records."""


class EnoughError(Exception):
    """The run has made the updates that are compared."""


def weights_after(
    config: RunConfig, shape: ModelShape = SHAPE
) -> tuple[dict[str, torch.Tensor], tuple[Intervention, ...], list[StepRecord]]:
    """Return all weights after so many updates, the journal of all ranks and rank 0's records."""
    world_size = config.parallel.mesh.world_size
    ranks = LocalWorld(world_size, timeout_s=60.0).run(rank_after, config, shape)
    return joined(ranks)


def rank_after(world: Communicator, config: RunConfig, shape: ModelShape) -> RankEnd:
    """Return what one rank has after so many updates."""
    journal = MemoryJournal()
    parts = assemble(config, world, text(), shape, journal)
    progress = parts.start()
    records: list[StepRecord] = []

    def observe(record: StepRecord) -> None:
        records.append(record)
        if progress.updates == UPDATES:
            raise EnoughError

    with pytest.raises(EnoughError):
        train(parts, progress, [observe])
    pieces = parts.model.pieces.items()
    return {n: p.parameter.detach().clone() for n, p in pieces}, journal.entries, records


def joined(ranks: list[RankEnd]) -> RankEnd:
    """Return the weights of all ranks, whose journals and verdicts must be alike."""
    assert len({str(entries) for _, entries, _ in ranks}) == 1
    assert len({str([r.verdict for r in records]) for _, _, records in ranks}) == 1
    together = {
        f"{n} on {rank}": w for rank, (own, _, _) in enumerate(ranks) for n, w in own.items()
    }
    return together, ranks[0][1], ranks[0][2]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return factors of the loss by the number of the batch whose data bring them."""
    factors: dict[int, float] = {}
    poison_losses(monkeypatch, factors)
    return factors


def poison_losses(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply the losses of batches by the factors of their numbers."""
    inputs, loss = GlobalBatch.inputs, DecoderStage.loss

    def poisoned(batch: GlobalBatch, stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        first = batch.part.positions.spans[0][0]
        factor = torch.tensor(factors.get(first // BATCH, 1.0))
        return {**inputs(batch, stage, microbatch), "factor": factor}

    def exploding(stage: DecoderStage, logits: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        return loss(stage, logits, **given) * given["factor"]

    monkeypatch.setattr(GlobalBatch, "inputs", poisoned)
    monkeypatch.setattr(DecoderStage, "loss", exploding)


@pytest.mark.parametrize(
    ("factor", "changes", "verdict"),
    [
        (math.nan, {"layout": "dp=2,tp=2,pp=2", "zero": 2, "microbatches": 2}, Verdict.SKIP),
        (40.0, {"layout": "dp=2,tp=2,pp=2", "zero": 3, "microbatches": 2}, Verdict.ROLLBACK),
        pytest.param(
            math.nan,
            {"layout": "dp=2", "dtype": "fp8-delayed"},
            Verdict.SKIP,
            marks=pytest.mark.long,
        ),
        pytest.param(
            40.0,
            {"layout": "dp=2,cp=2", "zero": 1, "dtype": "fp8-delayed"},
            Verdict.ROLLBACK,
            marks=pytest.mark.long,
        ),
        pytest.param(
            40.0,
            {"layout": "dp=2,pp=2", "zero": 1, "dtype": "float16", "microbatches": 2},
            Verdict.ROLLBACK,
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_that_met_a_poisoned_batch_ends_with_the_weights_of_one_that_never_read_it(
    factor: float,
    changes: dict[str, object],
    verdict: Verdict,
    poison: dict[int, float],
    tmp_path: Path,
) -> None:
    guards, exclude = tmp_path / "guards.json", tmp_path / "exclude.json"
    guards.write_text(json.dumps(SPIKES))
    exclude.write_text(json.dumps([[BATCH * BAD, BATCH * BAD + BATCH]]))
    config = settings(guards=str(guards), warmup=10, **changes)
    poison[BAD] = factor

    found, journal, records = weights_after(config)

    right, nothing, _ = weights_after(config.evolve(exclude=str(exclude)))
    assert [entry.verdict for entry in journal] == [verdict]
    assert [record.verdict for record in records].count(verdict) == 1
    assert journal[0].left_out.spans == ((BATCH * BAD, BATCH * BAD + BATCH),)
    assert not nothing
    for name, weight in right.items():
        assert torch.equal(found[name], weight), name


def test_a_step_that_is_skipped_for_its_data_is_none_to_the_loss_scale(
    poison: dict[int, float], tmp_path: Path
) -> None:
    guards = tmp_path / "guards.json"
    skips = {"guards": {"joint-spike": {"min_history": 6, "evidence": 60}}}
    guards.write_text(json.dumps(skips))
    config = settings(guards=str(guards), warmup=10, steps=BAD + 2)
    poison[BAD] = 40.0

    def work(world: Communicator) -> tuple[int, int, int]:
        parts = assemble(config, world, text(), SHAPE)
        progress = parts.start()
        train(parts, progress)
        return progress.updates, progress.skipped, parts.scaler.num_applied

    assert LocalWorld(1).run(work) == [(BAD + 2, 1, BAD + 2)]


def test_a_run_resumed_from_before_a_skip_ends_with_the_weights_of_one_never_stopped(
    poison: dict[int, float], tmp_path: Path
) -> None:
    exclude = tmp_path / "exclude.json"
    exclude.write_text(json.dumps([[BATCH * BAD, BATCH * BAD + BATCH]]))
    poison[BAD] = math.nan
    config = settings(layout="dp=2", zero=1, warmup=3, steps=BAD + 2)
    files = CrashingFiles()

    def run(
        world: Communicator, config: RunConfig, entries: Sequence[Intervention], resumes: bool
    ) -> tuple[Progress, tuple[Intervention, ...], dict[str, torch.Tensor]]:
        parts = assemble(config, world, text(), SHAPE, MemoryJournal(tuple(entries)))
        place = parts.mesh.coordinates
        store = StateStore("/run", world, coordinates=place, files=files)
        progress = parts.start()
        if resumes:
            restored = restore_state(store, parts)
            assert restored is not None
            progress = restored

        def observe(record: StepRecord) -> None:
            if record.step == BAD - 1 and not resumes and not config.guards.exclude:
                save_state(store, parts, progress)

        train(parts, progress, [observe])
        pieces = parts.model.pieces.items()
        weights = {name: piece.parameter.detach().clone() for name, piece in pieces}
        return progress, parts.journal.entries, weights

    whole = LocalWorld(2, timeout_s=60.0).run(run, config, (), False)
    resumed = LocalWorld(2, timeout_s=60.0).run(run, config, whole[0][1], True)
    never = LocalWorld(2, timeout_s=60.0).run(run, config.evolve(exclude=str(exclude)), (), False)

    assert [entry.verdict for entry in whole[0][1]] == [Verdict.SKIP]
    for ranks, skipped in ((whole, 1), (resumed, 0), (never, 0)):
        for (progress, _, found), (_, _, right) in zip(ranks, whole, strict=True):
            counted = (progress.step, progress.updates, progress.skipped)
            assert counted == (BAD + 2 + skipped, BAD + 2, skipped)
            for name, weight in right.items():
                assert torch.equal(found[name], weight), name


def test_steps_that_are_skipped_for_ever_end_the_run(
    poison: dict[int, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recipe, "MOST_SKIPPED", 3)
    guards = tmp_path / "guards.json"
    guards.write_text('{"guards": {"non-finite": {"max_consecutive_skips": 100}}}')
    poison.update(dict.fromkeys([1, *range(4, 40)], math.nan))

    def work(world: Communicator) -> tuple[int, int]:
        parts = assemble(settings(guards=str(guards), layout="dp=2"), world, text(), SHAPE)
        progress = parts.start()
        with pytest.raises(HaltError, match="step 7: 3 steps in a row were skipped"):
            train(parts, progress)
        return progress.updates, progress.skipped

    assert LocalWorld(2, timeout_s=60.0).run(work) == [(3, 4)] * 2


def _end_over_each(gloo: Communicator, config: RunConfig, shape: ModelShape) -> dict[str, RankEnd]:
    worlds = {"gloo": gloo, "shm": SharedMemoryCommunicator()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        poison_losses(monkeypatch, {BAD: 40.0})
        return {name: rank_after(world, config, shape) for name, world in worlds.items()}


@pytest.mark.long
@pytest.mark.processes
def test_processes_that_go_back_end_with_the_weights_of_threads_that_do(
    poison: dict[int, float], tmp_path: Path
) -> None:
    guards = tmp_path / "guards.json"
    guards.write_text(json.dumps(SPIKES))
    config = settings(
        guards=str(guards), warmup=10, layout="dp=2,cp=2", zero=1, dtype="float64", microbatches=2
    )
    poison[BAD] = 40.0
    right, _, records = weights_after(config)

    ranks = run_processes(_end_over_each, 4, config, SHAPE, timeout_s=150.0)

    for name in ("gloo", "shm"):
        found, journal, again = joined([rank[name] for rank in ranks])
        assert [entry.verdict for entry in journal] == [Verdict.ROLLBACK]
        assert [record.step for record in again] == [record.step for record in records]
        for weight, expected in zip(found.values(), right.values(), strict=True):
            assert torch.allclose(weight, expected, rtol=0.0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (MIXED, {"layout": "dp=2,ep=2", "model": "tiny-moe", "zero": 3}),
        (MIXED, {"layout": "dp=2,cp=2,ep=4", "model": "tiny-moe", "recompute": "full"}),
        (SHAPE, {"layout": "dp=2,cp=2", "context": "ulysses", "compress_activations": "int8"}),
    ],
)
def test_what_is_nan_on_one_data_rank_is_skipped_by_all_and_leaves_no_trace(
    shape: ModelShape,
    changes: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    exclude = tmp_path / "exclude.json"
    exclude.write_text(json.dumps([[BATCH * BAD, BATCH * BAD + BATCH]]))
    config = settings(warmup=10, **changes)
    right, _, _ = weights_after(config.evolve(exclude=str(exclude)), shape)
    batch = threading.local()
    inputs, forward = GlobalBatch.inputs, Attention.forward

    def noted(self: GlobalBatch, stage: int, microbatch: int) -> dict[str, torch.Tensor]:
        batch.number = self.part.positions.spans[0][0] // BATCH
        return inputs(self, stage, microbatch)

    def broken(attention: Any, *given: torch.Tensor) -> torch.Tensor:
        is_bad = batch.number == BAD and attention.layers.mesh.coordinate("dp") == 1
        return forward(attention, *given) * (math.nan if is_bad else 1.0)

    monkeypatch.setattr(GlobalBatch, "inputs", noted)
    monkeypatch.setattr(Attention, "forward", broken)

    found, journal, _ = weights_after(config, shape)

    assert [entry.verdict for entry in journal] == [Verdict.SKIP]
    for name, weight in right.items():
        assert torch.equal(found[name], weight), name


def test_a_loss_that_explodes_whatever_is_read_ends_the_run_after_bounded_rollbacks(
    poison: dict[int, float], tmp_path: Path
) -> None:
    guards = tmp_path / "guards.json"
    guards.write_text(json.dumps({**SPIKES, "recovery": {"snapshot_every": 4, "max_rollbacks": 2}}))
    config = settings(guards=str(guards), layout="dp=2", warmup=10)
    poison.update(dict.fromkeys(range(BAD, 40), 40.0))

    def work(world: Communicator) -> list[Verdict]:
        parts = assemble(config, world, text(), SHAPE)
        with pytest.raises(HaltError, match=r"max_rollbacks|gone back 2 times|alarm"):
            train(parts, parts.start())
        return [entry.verdict for entry in parts.journal.entries]

    for verdicts in LocalWorld(2, timeout_s=60.0).run(work):
        assert verdicts == [Verdict.ROLLBACK, Verdict.ROLLBACK, Verdict.HALT]


@pytest.mark.parametrize(
    ("snapshot_every", "keep", "saves_first", "goes_on_from"),
    [
        (4, None, False, 4),
        (4, Retention(1), True, 4),
        (4, Retention(1), False, 4),
        # It goes back to the beginning, where no checkpoint is.
        (50, Retention(1), False, 0),
    ],
)
def test_a_run_killed_after_a_rollback_resumes_before_what_it_has_taken_back(
    snapshot_every: int,
    keep: Retention | None,
    saves_first: bool,
    goes_on_from: int,
    poison: dict[int, float],
    tmp_path: Path,
) -> None:
    guards, exclude = tmp_path / "guards.json", tmp_path / "exclude.json"
    plan = {"snapshot_every": snapshot_every, "skip_before": 2}
    guards.write_text(json.dumps({**SPIKES, "recovery": plan}))
    exclude.write_text(json.dumps([[BATCH * (BAD - 2), BATCH * BAD + BATCH]]))
    config = settings(guards=str(guards), layout="dp=2", zero=1, warmup=10, save_every=2)
    poison[BAD] = 40.0
    files = CrashingFiles()

    def run(world: Communicator) -> tuple[int, dict[str, torch.Tensor]]:
        journal = MemoryJournal(journals.get(world.rank, ()))
        parts = assemble(config, world, text(), SHAPE, journal)
        place = parts.mesh.coordinates
        store = StateStore("/run", world, coordinates=place, keep=keep, files=files)
        progress = restore_state(store, parts) or parts.start()
        began = progress.step

        def observe(record: StepRecord) -> None:
            journals[world.rank] = journal.entries
            if record.verdict is Verdict.ROLLBACK or progress.updates == UPDATES:
                raise EnoughError

        saver = Saver(store, parts, progress, began or None)
        with pytest.raises(EnoughError):
            train(parts, progress, [saver, observe] if saves_first else [observe, saver])
        pieces = parts.model.pieces.items()
        return began, {n: p.parameter.detach().clone() for n, p in pieces}

    journals: dict[int, tuple[Intervention, ...]] = {}
    first = LocalWorld(2, timeout_s=60.0).run(run)
    second = LocalWorld(2, timeout_s=60.0).run(run)

    right, _, _ = weights_after(config.evolve(exclude=str(exclude)))
    # Checkpoints of steps 6 and 8 held batches to blame.
    assert [began for began, _ in [*first, *second]] == [0, 0, goes_on_from, goes_on_from]
    assert [entry.back_to for entry in journals[0]] == [goes_on_from]
    for rank, (_, weights) in enumerate(second):
        for name, weight in weights.items():
            assert torch.equal(right[f"{name} on {rank}"], weight), name


def test_a_flipped_bit_of_a_replica_is_found_within_the_interval_and_named_on_every_rank() -> None:
    config = settings(layout="dp=3,pp=2", microbatches=2)
    name = "model.layers.1.self_attn.q_proj.weight"

    def work(world: Communicator) -> str:
        parts = assemble(config, world, text(), SHAPE)

        def flip(record: StepRecord) -> None:
            if record.step == 3 and world.rank == 5:
                bits = parts.model.pieces[name].parameter.detach().view(torch.int32)
                bits.view(-1)[7] ^= 1
            assert record.step < 5

        with pytest.raises(HaltError) as caught:
            train(parts, parts.start(), [flip, ReplicaCheck(parts, 2)])
        return str(caught.value)

    for message in LocalWorld(6, timeout_s=60.0).run(work):
        assert message.startswith("step 4: ")
        assert f"{name} of stage 1 on 5" in message
