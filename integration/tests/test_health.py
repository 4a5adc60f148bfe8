"""Warnings about a run: a first loss that knows too much or too little, and slow ranks by name."""

from __future__ import annotations

import threading

import attrs
import numpy as np

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import Corpus, ModelShape, RunConfig, assemble
from trainwright.integration.health import InitialLoss, Stragglers, pulse, warnings_of
from trainwright.integration.recipe import StepRecord, train
from trainwright.pipeline_schedules.execute import StepResult
from trainwright.stability_guards import StragglerWatch, Verdict

STREAM = np.frombuffer(b"whoever is slow should be told from whoever waits. " * 4, np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
SHAPE = ModelShape(width=16, layers=2, heads=2, kv_heads=1, mlp_width=24)
CONFIG = RunConfig.of(steps=3, global_batch=8, sequence_length=15, warmup=0, measure_every=1)
RECORD = StepRecord(1, loss=3.0, grad_norm=1.0, lr=0.1, tokens=8, seconds=1.0, verdict=Verdict(0))


def test_a_first_loss_far_from_that_of_the_uniform_guess_is_told_on_the_first_rank() -> None:
    def work(world: Communicator) -> list[str]:
        parts = assemble(CONFIG.evolve(layout="dp=2"), world, CORPUS, SHAPE)
        told: list[str] = []
        observe = InitialLoss(parts, told.append)
        observe(attrs.evolve(RECORD, loss=5.5))
        observe(RECORD)
        observe(attrs.evolve(RECORD, step=2, loss=1.0))
        return told

    first, second = LocalWorld(2, timeout_s=60.0).run(work)

    assert len(first) == 1
    assert "within 1.0 of ln 256 = 5.5452, got 3.0" in first[0]
    assert second == []


def test_a_rank_that_computes_longer_than_its_likes_is_named_once_by_its_rank_of_the_world() -> (
    None
):
    def work(world: Communicator) -> list[str]:
        parts = assemble(CONFIG.evolve(layout="pp=2,dp=3", global_batch=6), world, CORPUS, SHAPE)
        told: list[str] = []
        observe = Stragglers(parts, told.append, StragglerWatch(factor=1.5, in_a_row=2))
        results: list[StepResult] = []

        def keep(record: StepRecord) -> None:
            assert record.pipeline is not None
            results.append(record.pipeline)

        train(attrs.evolve(parts, config=parts.config.evolve(steps=1)), parts.start(), [keep])
        (timeline,) = (result.timeline for result in results)
        assert timeline is not None
        # The last stage's ranks take twice as long as the first's, which is no news.
        pace = 10.0 if world.rank == 4 else 2.0 if world.rank > 2 else 1.0
        even = [attrs.evolve(timed, start_s=0.0, stop_s=pace) for timed in timeline]
        for step in range(1, 5):
            result = attrs.evolve(results[0], timeline=tuple(even))
            observe(attrs.evolve(RECORD, step=step, pipeline=result))
        return told

    ranks = LocalWorld(6, timeout_s=60.0).run(work)

    assert [len(told) for told in ranks] == [0, 0, 0, 1, 0, 0]
    assert ranks[3][0].startswith("warning: step 2: rank 4 of the world computes for ")


def test_a_healthy_short_run_is_told_nothing_of_its_first_loss() -> None:
    def work(world: Communicator) -> list[str]:
        parts = assemble(CONFIG, world, CORPUS, SHAPE)
        told: list[str] = []
        train(parts, parts.start(), warnings_of(parts, told.append))
        return told

    assert LocalWorld(1, timeout_s=60.0).run(work) == [[]]


def test_a_rank_whose_steps_stop_ending_is_told_once_and_one_that_ends_is_not() -> None:
    told: list[str] = []
    silent = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        silent.set()

    with pulse(3, tell, least_s=0.05) as beat:
        beat(RECORD)
        assert silent.wait(30.0)

    assert len(told) == 1
    assert told[0].startswith("warning: rank 3: no step has ended for ")
