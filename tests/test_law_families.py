"""The law for models of other families: biases, other norms and positions, other experts."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from tests.equivalence.families import FAMILIES
from tests.layouts import steps_in_layout
from tests.serial import Outcome, SerialRun, Snapshot, settings
from trainwright.integration.model import ModelShape

TOLERANCE = 1e-12
ZERO = 1e-9
"""Below so small a share of the largest gradient, one is exactly zero but for rounding."""

SAMPLE: list[tuple[str, str, dict[str, object]]] = [
    ("gpt2", "tp=2,pp=2", {"microbatches": 2, "zero": 3, "sequence_parallel": True}),
    ("qwen2", "tp=3,cp=2", {"zero": 2, "sequence_parallel": True}),
    ("latent", "tp=2,pp=2,ep=2,etp=1", {"microbatches": 2, "zero": 3, "sequence_parallel": True}),
]
DENSE: list[tuple[str, dict[str, object]]] = [
    ("tp=2", {"zero": 0}),
    ("tp=8", {"zero": 0, "sequence_parallel": True}),
    ("dp=2,tp=3", {"zero": 3, "sequence_parallel": True, "recompute": "every-2"}),
    ("cp=3,pp=2", {"zero": 1, "microbatches": 3, "schedule": "zb-h1"}),
    ("cp=2,tp=2", {"zero": 2, "sequence_parallel": True, "context": "ulysses"}),
    (
        "dp=2,tp=2,pp=2",
        {"zero": 3, "microbatches": 2, "schedule": "zb-v", "sequence_parallel": True},
    ),
    ("dp=2,pp=2", {"zero": 3, "microbatches": 3, "gather": "unit", "reduce": "microbatch"}),
]
MIXED: list[tuple[str, dict[str, object]]] = [
    ("dp=4,ep=4", {"zero": 0, "microbatches": 3}),
    ("dp=2,tp=2,pp=2,ep=2", {"zero": 3, "microbatches": 2, "sequence_parallel": True}),
    ("dp=4,tp=2,ep=4,etp=1", {"zero": 1}),
    ("cp=4,pp=2,ep=2", {"zero": 2, "microbatches": 3, "schedule": "zb-v", "recompute": "full"}),
]
LONG = [
    (family, layout, variant)
    for family, shape in FAMILIES.items()
    for layout, variant in (DENSE if shape.experts is None else MIXED)
]


@functools.cache
def serial_step(shape: ModelShape) -> tuple[Snapshot, Outcome]:
    """Return a state of a short serial run in which every parameter matters, and its next step."""
    run = SerialRun(shape, settings(dtype="float64"))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in run.named.values():
            noise = torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.1)
    for _ in range(3):
        run.step()
    return run.snapshot(), run.step()


def assert_same_step(family: str, layout: str, variant: dict[str, object]) -> None:
    shape = FAMILIES[family]
    before, right = serial_step(shape)
    config = settings(layout=layout, dtype="float64", **variant)

    (found,) = steps_in_layout(config, shape, [before])

    assert math.isclose(found.loss, right.loss, rel_tol=TOLERANCE)
    assert math.isclose(found.norm, right.norm, rel_tol=TOLERANCE)
    assert found.gradients.keys() == right.gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in right.gradients.values())
    for name, gradient in right.gradients.items():
        size = float(gradient.abs().max())
        apart = float((found.gradients[name] - gradient).abs().max())
        assert apart <= TOLERANCE * max(size, 1e-3 * largest), (name, apart, size)
        if size > ZERO * largest:
            moved = float((found.weights[name] - right.weights[name]).abs().max())
            assert moved <= 10 * TOLERANCE * float(right.weights[name].abs().max()), (name, moved)


@pytest.mark.parametrize(("family", "layout", "variant"), SAMPLE, ids=[s[0] for s in SAMPLE])
def test_one_step_of_a_family_in_a_layout_is_its_serial_step(
    family: str, layout: str, variant: dict[str, object]
) -> None:
    assert_same_step(family, layout, variant)


@pytest.mark.long
@pytest.mark.parametrize(("family", "layout", "variant"), LONG[::2])
def test_one_step_of_every_family_in_some_layouts_is_its_serial_step(
    family: str, layout: str, variant: dict[str, object]
) -> None:
    assert_same_step(family, layout, variant)
