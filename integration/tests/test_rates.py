"""Learning rates and weight decays of runs: chosen by name, following applied updates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import Corpus, ModelShape, RunConfig, assemble, train
from trainwright.integration.errors import ConfigError
from trainwright.integration.fitting import check_fits
from trainwright.integration.rates import learning_rate
from trainwright.integration.recipe import StepRecord

STREAM = np.frombuffer(b"rates rise, stay and fall, whoever looks at them. " * 5, dtype=np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
SHAPE = ModelShape(width=16, layers=2, heads=2, kv_heads=1, mlp_width=24)


def rates_of(**leaves: Any) -> list[float]:
    config = RunConfig.of(lr=1.0, **leaves)
    schedule = learning_rate(config.rate, config.optimizer.lr, config.steps)
    return [schedule(update) for update in range(config.steps + 2)]


def test_each_schedule_rises_to_the_peak_and_ends_as_it_is_called() -> None:
    ten = {"steps": 10, "warmup": 2}

    assert rates_of(lr_schedule="constant", **ten) == pytest.approx([0.5] + [1.0] * 11)
    assert rates_of(lr_schedule="linear", lr_floor=0.2, **ten) == pytest.approx(
        [0.5, *(1.0 - 0.1 * k for k in (-0, 0, 1, 2, 3, 4, 5, 6, 7)), 0.2, 0.2]
    )
    assert rates_of(**ten) == pytest.approx(
        [0.5, 1.0] + [0.1 + 0.45 * (1 + math.cos(math.pi * k / 8)) for k in range(8)] + [0.1, 0.1]
    )
    assert rates_of(lr_schedule="polynomial", lr_floor=0.0, **ten) == pytest.approx(
        [0.5, 1.0, *((1 - k / 8) ** 2 for k in range(8)), 0.0, 0.0]
    )
    assert rates_of(lr_schedule="inverse-sqrt", **ten) == pytest.approx(
        [0.5, 1.0, *(math.sqrt(2 / k) for k in range(2, 12))]
    )
    assert rates_of(
        lr_schedule="wsd", decay_steps=4, decay_shape="linear", lr_floor=0.0, **ten
    ) == (pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]))


def test_a_fall_may_end_before_the_run_and_its_length_may_be_a_part_of_it() -> None:
    given = {"lr_schedule": "linear", "steps": 10, "warmup": 2, "lr_floor": 0.0}

    early = rates_of(decay_steps=4, **given)

    assert early == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0, 0, 0, 0, 0, 0])
    assert rates_of(decay_fraction=0.4, **given) == early


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"decay_shape": "linear"}, "--decay-shape linear has no effect with --lr-schedule cosine"),
        ({"lr_schedule": "constant", "lr_floor": 0.1}, "--lr-floor 0.1 has no effect"),
        ({"decay_steps": 5, "decay_fraction": 0.5}, "--decay-steps 5 and --decay-fraction 0.5 say"),
        ({"warmup": 11}, "--warmup 11 must be at most --steps 10"),
        ({"lr_schedule": "wsd", "warmup": 4, "decay_steps": 7}, "--decay-steps up to 6 works"),
        ({"weight_decay": 0.0, "weight_decay_end": 0.1}, "--weight-decay-end 0.1 needs"),
        ({"lr_schedule": "cosines"}, "did you mean cosine?"),
    ],
)
def test_settings_of_rates_that_contradict_are_refused_with_a_way_out(
    leaves: dict[str, Any], message: str
) -> None:
    def check() -> None:
        config = RunConfig.of(steps=10, **leaves)
        check_fits(SHAPE, config)

    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        check()


def run(
    world: Communicator, config: RunConfig
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return the rates and decays of the steps, and this rank's weights at the end."""
    parts = assemble(config, world, CORPUS, SHAPE)
    records: list[StepRecord] = []
    decays: list[float] = []

    def observe(record: StepRecord) -> None:
        records.append(record)
        decays.append(max(group["weight_decay"] for group in parts.optimizer.param_groups))
        assert min(group["weight_decay"] for group in parts.optimizer.param_groups) == 0.0

    train(parts, parts.start(), [observe])
    whole = {n: p.parameter.detach().clone() for n, p in parts.model.pieces.items()}
    return [record.lr for record in records], decays, whole


def test_a_moving_weight_decay_and_a_named_schedule_reach_every_rank() -> None:
    leaves = {
        "lr_schedule": "wsd",
        "lr": 0.01,
        "warmup": 1,
        "decay_steps": 2,
        "weight_decay": 0.5,
        "weight_decay_end": 4.0,
    }
    config = RunConfig.of(steps=5, global_batch=4, sequence_length=15, dtype="float64", **leaves)

    ((rates, decays, alone),) = LocalWorld(1, timeout_s=60.0).run(run, config)
    parallel = LocalWorld(2, timeout_s=60.0).run(run, config.evolve(layout="dp=2"))

    schedule = learning_rate(config.rate, 0.01, 5)
    assert rates == [schedule(update) for update in range(5)]
    assert decays == pytest.approx([0.5, 1.375, 2.25, 3.125, 4.0])
    for found, moved, weights in parallel:
        assert (found, moved) == (rates, decays)
        for name, weight in weights.items():
            assert torch.allclose(weight, alone[name], rtol=0, atol=1e-12), name
