"""What guards are told of the model: the same numbers on every rank and in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import Corpus, ModelShape, RunConfig, assemble, train
from trainwright.integration.errors import ConfigError
from trainwright.integration.guarding import read_guards
from trainwright.integration.model.attention import Attention
from trainwright.integration.model.decoder import build_stage
from trainwright.integration.model.initialize import initialize_
from trainwright.integration.model.layers import PlainLayers
from trainwright.integration.model.packing import attend_causally
from trainwright.integration.recipe import StepRecord
from trainwright.integration.signals import ATTENTION, LOGIT, UPDATE, Signals
from trainwright.sharding import placements_of
from trainwright.stability_guards import Report, Verdict

STREAM = np.frombuffer(b"a model says more of itself than its loss does, if asked. " * 4, np.uint8)
CORPUS = Corpus(train=STREAM, held_out=STREAM, files=1, skipped=(), source="a test")
SHAPE = ModelShape(width=16, layers=2, heads=4, kv_heads=2, mlp_width=24)


@pytest.fixture
def guards(tmp_path: Path) -> Path:
    path = tmp_path / "guards.json"
    path.write_text(json.dumps({"guards": {"attention-growth": {}}, "signals_every": 2}))
    return path


def run(
    world: Communicator, config: RunConfig
) -> tuple[list[dict[str, float]], list[dict[str, torch.Tensor]]]:
    """Return what each step heard, and all weights of this rank before each step and at the end."""
    parts = assemble(config, world, CORPUS, SHAPE)
    signals, told = parts.signals, []
    heard = signals.heard

    def telling() -> dict[str, torch.Tensor]:
        found = dict(heard())
        told.append({name: float(value) for name, value in found.items()})
        return found

    signals.heard = telling  # type: ignore[method-assign]
    weights: list[dict[str, torch.Tensor]] = []

    def keep(_: StepRecord | None) -> None:
        pieces = parts.model.pieces.items()
        weights.append({name: piece.parameter.detach().clone() for name, piece in pieces})

    keep(None)
    train(parts, parts.start(), [keep])
    return told, weights


def settings(guards: Path, **leaves: Any) -> RunConfig:
    base = RunConfig.of(steps=4, global_batch=8, sequence_length=15, warmup=1, dtype="float64")
    return base.evolve(guards=str(guards), micro_batch=2, lr=0.01, **leaves)


def test_signals_are_those_of_the_plain_model_every_so_many_steps(
    guards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(guards)
    ((told, weights),) = LocalWorld(1, timeout_s=60.0).run(run, config)

    assert [sorted(each) for each in told] == [
        [ATTENTION, LOGIT], [UPDATE], [ATTENTION, LOGIT], [UPDATE],
    ]  # fmt: skip
    for at, step in ((0, told[1]), (2, told[3])):
        ratios = [
            float((weights[at + 1][n] - old).norm() / old.norm()) for n, old in weights[at].items()
        ]
        assert step[UPDATE] == pytest.approx(max(ratios), rel=1e-12)
    model = build_stage(SHAPE, PlainLayers(), range(2), _in_turn).double()
    initialize_(model, placements_of(model), SHAPE, seed=0)
    samples = CORPUS.samples(15, 0)
    rows = np.stack([samples.sample(place).tokens[:-1] for place in range(8)])
    largest: list[float] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Any = None) -> torch.Tensor:
        scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 2.0
        largest.append(float(scores.detach().abs().amax()))
        return attend_causally(q, k, v)

    monkeypatch.setattr(PlainLayers, "attend", lambda layers, *given: attend(*given))
    logits = model(tokens_BS=torch.from_numpy(rows.astype(np.int64)))
    assert told[0][LOGIT] == pytest.approx(float(logits.detach().abs().amax()), rel=1e-12)
    # The bound is one: never below, and of the same order.
    assert max(largest) <= told[0][ATTENTION] <= 4.0 * max(largest)


def _in_turn(layers: Any, hidden: Any, *args: Any) -> Any:
    for layer in layers:
        hidden = layer(hidden, *args)
    return hidden


@pytest.mark.parametrize("layout", ["dp=2,tp=2,pp=2", "cp=4"])
def test_signals_are_the_same_on_every_rank_and_in_every_layout(guards: Path, layout: str) -> None:
    config = settings(guards, layout=layout, zero=2 if "dp" in layout else 0)

    ((right, _),) = LocalWorld(1, timeout_s=60.0).run(run, settings(guards))
    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(run, config)

    assert len({json.dumps(told) for told, _ in ranks}) == 1
    for found, alone in zip(ranks[0][0], right, strict=True):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert found[name] == pytest.approx(value, rel=1e-8), name


def test_a_guard_of_updates_that_rewrite_weights_speaks_in_a_run(tmp_path: Path) -> None:
    path = tmp_path / "guards.json"
    rule = {"most": 1e-6, "in_a_row": 1}
    path.write_text(json.dumps({"guards": {"update-ratio": rule}, "signals_every": 1}))

    def work(world: Communicator) -> list[tuple[Verdict, str]]:
        parts = assemble(settings(path, steps=2), world, CORPUS, SHAPE)
        train(parts, parts.start())
        return [(entry.verdict, entry.reason) for entry in parts.journal.entries]

    ((found,),) = LocalWorld(1, timeout_s=60.0).run(work)

    assert found[0] is Verdict.SKIP
    assert found[1].startswith("step 1: update_ratio ")


def test_without_guards_of_the_model_nothing_is_measured_and_no_hook_is_left() -> None:
    def work(world: Communicator) -> tuple[int, int]:
        parts = assemble(RunConfig.of(sequence_length=15), world, CORPUS, SHAPE)
        hooks = [
            hook
            for stage in parts.model.stages.values()
            for module in stage.modules()
            if isinstance(module, Attention)
            for hook in module.q_norm._forward_hooks
        ]
        parts.signals.listen(0)
        return len(hooks), len(parts.signals.heard())

    assert LocalWorld(1, timeout_s=60.0).run(work) == [(0, 0)]
    assert isinstance(Signals, type)


def test_files_that_ask_for_signals_in_vain_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "guards.json"
    for content, message in (
        ({"guards": {"stall": {}}, "signals_every": 5}, "signals_every has no effect"),
        ({"guards": {"logit-growth": {}}, "signals_every": 0}, "logit-growth need signals_every"),
        ({"guards": {"logit-growth": {"signal": "loss"}}}, "logit-growth knows"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=message):
            read_guards(str(path))
    path.write_text(json.dumps({"guards": {"logit-growth": {"factor": 2.0}}}))
    assert read_guards(str(path)).signals_every == 20
    assert read_guards("all").signals_every == 20


class AskedFor(dict[str, float]):
    """Signals of a report that remember which of them guards have asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def get(self, name: str, default: float | None = None) -> float | None:  # type: ignore[override]
        self.asked.add(name)
        return 1.0


@pytest.mark.parametrize("named", ["default", "none", "all", "logit-growth", "update-ratio"])
def test_a_plan_says_which_signals_of_the_model_its_guards_ask_for(
    tmp_path: Path, named: str
) -> None:
    text = named
    if named not in ("default", "none", "all"):
        (tmp_path / "guards.json").write_text(f'{{"guards": {{"{named}": {{}}}}}}')
        text = str(tmp_path / "guards.json")
    plan = read_guards(text)
    signals = AskedFor()

    plan.guard.update(plan.guard.initial(), Report(0, 1.0, 1.0, signals=signals))

    assert set(plan.signals) == signals.asked
