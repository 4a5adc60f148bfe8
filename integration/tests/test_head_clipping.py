"""Heads whose attention logits pass a bound have their weights shrunk, in every layout alike."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import Corpus, ModelShape, RunConfig, assemble, train
from trainwright.integration.errors import ConfigError
from trainwright.integration.fitting import check_fits, fitting_guards
from trainwright.integration.model import LatentShape
from trainwright.integration.model.decoder import build_stage
from trainwright.integration.model.initialize import initialize_
from trainwright.integration.model.layers import PlainLayers
from trainwright.integration.model.packing import attend_causally
from trainwright.integration.recipe import StepRecord
from trainwright.sharding import placements_of
from trainwright.stability_guards import qk_clip_factors

STREAM = np.frombuffer(b"attention that grows without bound is no attention. " * 4, np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
SHAPE = ModelShape(width=16, layers=2, heads=4, kv_heads=2, mlp_width=24)


def config(**leaves: Any) -> RunConfig:
    base = RunConfig.of(steps=3, global_batch=8, sequence_length=15, warmup=0, dtype="float64")
    return base.evolve(micro_batch=2, lr=0.01, **leaves)


def run(
    world: Communicator, settings: RunConfig
) -> tuple[list[StepRecord], dict[str, torch.Tensor]]:
    """Return what the steps did, and this rank's weights at the end."""
    parts = assemble(settings, world, CORPUS, SHAPE)
    records: list[StepRecord] = []
    train(parts, parts.start(), [records.append])
    pieces = parts.model.pieces.items()
    return records, {name: piece.parameter.detach().clone() for name, piece in pieces}


def first_logits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return the largest logit of each head of each layer, of the first batch, written out."""
    found: list[torch.Tensor] = []

    def attend(
        layers: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any = None
    ) -> Any:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 2.0
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        found.append(scores.detach().masked_fill(ahead, -torch.inf).amax((0, 2, 3)))
        return attend_causally(q, k, v)

    model = build_stage(SHAPE, PlainLayers(), range(2), _in_turn).double()
    initialize_(model, placements_of(model), SHAPE, seed=0)
    samples = CORPUS.samples(15, 0)
    rows = np.stack([samples.sample(place).tokens[:-1] for place in range(8)])
    with monkeypatch.context() as patched:
        patched.setattr(PlainLayers, "attend", attend)
        model(tokens_BS=torch.from_numpy(rows.astype(np.int64)))
    return found


def _in_turn(layers: Any, hidden: Any, *args: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden, *args)
    return hidden


@pytest.mark.parametrize("are_all_above", [False, True])
def test_heads_above_the_bound_shrink_by_the_published_factors_and_nothing_else_does(
    are_all_above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = first_logits(monkeypatch)
    largest = torch.cat(logits)
    bound = float(largest.min() / 2 if are_all_above else largest.median())

    ((_, kept),) = LocalWorld(1, timeout_s=60.0).run(run, config(steps=1))
    ((_, clipped),) = LocalWorld(1, timeout_s=60.0).run(run, config(steps=1, qk_clip=bound))

    factors = [qk_clip_factors(each, 2, bound) for each in logits]
    # Keys shrink where all heads that share them are above.
    assert all(bool((k_K < 1).all()) is are_all_above for _, k_K in factors)
    if not are_all_above:
        assert any(bool((q_H < 1).any()) and bool((q_H == 1).any()) for q_H, _ in factors)
    expected = dict(kept)
    for layer, (q_H, k_K) in enumerate(factors):
        for name, scale in (("q_proj", q_H), ("k_proj", k_K)):
            full = f"model.layers.{layer}.self_attn.{name}.weight"
            expected[full] = kept[full] * scale.repeat_interleave(4)[:, None]
    for name, weight in expected.items():
        assert torch.allclose(clipped[name], weight, rtol=1e-12, atol=0), name


@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "tp=4"])
def test_clipped_runs_are_the_same_in_every_layout(layout: str) -> None:
    settings = config(qk_clip=0.001, recompute="full")

    ((alone, _),) = LocalWorld(1, timeout_s=60.0).run(run, settings)
    ((free, _),) = LocalWorld(1, timeout_s=60.0).run(run, config())
    chosen = settings.evolve(layout=layout, zero=1 if "dp" in layout else 0)
    ranks = LocalWorld(chosen.parallel.mesh.world_size, timeout_s=60.0).run(run, chosen)

    assert alone[-1].grad_norm != pytest.approx(free[-1].grad_norm, rel=1e-7)
    for records, _ in ranks:
        for found, right in zip(records, alone, strict=True):
            assert found.loss == pytest.approx(right.loss, rel=1e-10)
            assert found.grad_norm == pytest.approx(right.grad_norm, rel=1e-9)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"layout": "cp=2"}, "context ranks have parts of the sequences; set cp=1"),
        ({"packing": "documents"}, "documents of --packing documents do not see each other"),
        ({"qk_norm": True}, "norms of queries and keys would undo it"),
        ({"qk_clip": -1.0}, "--qk-clip must be positive"),
    ],
)
def test_clipping_that_cannot_hear_the_logits_is_refused(
    leaves: dict[str, Any], message: str
) -> None:
    def check() -> None:
        settings = config(**{"qk_clip": 100.0, **leaves})
        shape = settings.model.applied(SHAPE)
        check_fits(shape, settings)

    with pytest.raises(ConfigError, match=message):
        check()


def test_latent_attention_is_neither_clipped_nor_watched_in_silence() -> None:
    sizes = LatentShape(keys=8, plain=8, turned=4, values=8)
    shape = attrs.evolve(SHAPE, latent=sizes, kv_heads=4)
    with pytest.raises(ConfigError, match="keys of latent attention are not clipped here"):
        check_fits(shape, config(qk_clip=100.0))
    told = "watches attention_logit_max, which latent attention does not bring"
    with pytest.raises(ConfigError, match=told):
        fitting_guards(shape, config(guards="all"))
