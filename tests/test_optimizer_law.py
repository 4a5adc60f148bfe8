"""The law for every optimizer: in any layout it makes torch's own updates of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.optimizer_runs import (
    ORACLES,
    PaperLion,
    assert_same_updates,
    by_dims,
    settings,
    shape_of,
    updates_in_layout,
)
from tests.serial import text
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.errors import ConfigError
from trainwright.integration.optimizers import OPTIMIZERS, plan_of
from trainwright.integration.parts import assemble
from trainwright.precision import MasterWeights

SAMPLE: list[tuple[str, str, dict[str, Any]]] = [
    ("adam", "dp=2", {"zero": 1}),
    ("sgd", "pp=2", {"microbatches": 2}),
    ("lion", "dp=2", {"zero": 3, "steps": 3}),  # a third shows what of the first is kept
    ("adafactor", "dp=2,tp=2", {"zero": 2, "model": "tiny-tied"}),
    ("muon", "dp=2,tp=2,ep=2", {"zero": 1, "model": "tiny-moe"}),
]
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dp=1", {}),
    ("dp=4", {}),
    ("tp=2", {}),
    ("tp=3", {}),
    ("dp=2,tp=2,pp=2", {"microbatches": 2, "sequence_parallel": True}),
    ("dp=2,pp=2", {"microbatches": 2, "model": "tiny-tied"}),
    ("dp=2,tp=2", {"microbatches": 2, "model": "tiny-tied", "schedule": "zb-v"}),
    ("dp=2,cp=2", {}),
    ("dp=4,dp_shard=2", {}),
    ("dp=2,tp=2,ep=2", {"model": "tiny-moe"}),
    ("dp=4,ep=4", {"model": "tiny-moe"}),
    ("dp=2,tp=2,ep=4,etp=1", {"model": "tiny-moe"}),
    ("dp=2,cp=2,tp=2,ep=2,etp=4", {"model": "tiny-moe"}),
]


def test_every_named_optimizer_has_an_oracle() -> None:
    assert set(ORACLES) == set(OPTIMIZERS)


@pytest.mark.parametrize(
    ("name", "layout", "changes"), SAMPLE, ids=[f"{s[0]}-{s[1].replace(',', '-')}" for s in SAMPLE]
)
def test_updates_in_a_layout_are_those_of_torch_on_the_plain_model(
    name: str, layout: str, changes: dict[str, Any]
) -> None:
    found = updates_in_layout(
        settings(**{"optimizer": name, "layout": layout, "steps": 2, **changes})
    )

    assert_same_updates(found, ORACLES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", list(ORACLES))
@pytest.mark.parametrize(
    ("layout", "changes"),
    LAYOUTS,
    ids=[f"{n}-{c[0].replace(',', '-')}" for n, c in enumerate(LAYOUTS)],
)
def test_updates_in_every_layout_are_those_of_torch_on_the_plain_model(
    name: str, layout: str, changes: dict[str, Any]
) -> None:
    found = updates_in_layout(settings(optimizer=name, layout=layout, zero=3, **changes))

    assert_same_updates(found, ORACLES[name])


@pytest.mark.parametrize(
    ("factory", "zero"),
    [
        (partial(torch.optim.NAdam, weight_decay=0.01), 2),
        pytest.param(lambda groups: torch.optim.Rprop(groups), 1, marks=pytest.mark.long),
    ],
    ids=["NAdam", "Rprop"],
)
def test_an_optimizer_of_torch_that_has_no_name_here_is_given_from_python(
    factory: Callable[[Any], torch.optim.Optimizer], zero: int
) -> None:
    found = updates_in_layout(settings(layout="dp=2", zero=zero), factory)

    decay = 0.01 if "NAdam" in repr(factory) else 0.0
    assert_same_updates(found, lambda named: [factory(by_dims(named, decay))])


def test_clipping_is_of_gradients_as_they_are_and_leaves_the_size_of_muons_update() -> None:
    moved = {}
    for clip in (1.0, 0.01):
        first, step = updates_in_layout(settings(optimizer="muon", clip=clip, steps=1))
        squares = [gradient.square().sum() for gradient in step.gradients.values()]
        assert float(torch.stack(squares).sum().sqrt()) <= clip * (1 + 1e-9)
        name = "model.layers.0.mlp.up_proj.weight"
        moved[clip] = float((step.weights[name] - first.weights[name]).norm())

    assert moved[0.01] == pytest.approx(moved[1.0], rel=1e-2)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the loss again and again"),
        (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
        (
            lambda groups: PaperLion(groups),
            "PaperLion is not .* known to be element-wise.*element_wise",
        ),
        (lambda groups: groups, "must be a torch.optim.Optimizer, got a list"),
        (
            lambda groups: MasterWeights(groups, partial(torch.optim.AdamW, lr=0.1)),
            "MasterWeights writes and reads its states in a form of its own.*give that one",
        ),
    ],
    ids=["LBFGS", "SparseAdam", "unknown", "none", "masters"],
)
def test_an_optimizer_that_a_run_cannot_use_is_refused_with_the_reason(
    factory: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_of(factory, torch.optim.AdamW)


def test_a_weight_decay_that_the_optimizer_has_not_is_refused() -> None:
    def work(world: Communicator) -> None:
        config = settings(weight_decay=0.1)
        with pytest.raises(ConfigError, match="Rprop has no weight decay; choose --weight-decay 0"):
            assemble(config, world, text(), shape_of(config), optimizer=torch.optim.Rprop)

    LocalWorld(1).run(work)
