"""A fused optimizer that clips in its step makes the update that it makes of clipped gradients."""

import math

import pytest
import torch
from torch import nn

from trainwright.stability_guards import GuardError, clip_, clipping_in_step


def trained(optimizer_class, clip, steps=4, **options):
    """Train on fixed gradients, clipped by ``clip(optimizer, gradients)`` around each step."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.ones(shape)) for shape in [(3, 5), (7,), ()]]
    optimizer = optimizer_class(weights, lr=0.1, fused=True, **options)
    for _ in range(steps):
        for weight in weights:
            weight.grad = 3 * torch.randn(weight.shape, generator=generator)
        clip(optimizer, [weight.grad for weight in weights])
    return weights


@pytest.mark.parametrize("max_norm", [0.5, 100.0, math.inf])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.AdamW, {"eps": 0.1}), (torch.optim.SGD, {"momentum": 0.9})],
    ids=["AdamW", "SGD"],
)
def test_clipping_in_the_step_is_clipping_before_it(optimizer_class, options, max_norm):
    def before(optimizer, gradients):
        clip_(gradients, nn.utils.get_total_norm(gradients), max_norm)
        optimizer.step()

    def inside(optimizer, gradients):
        with clipping_in_step(optimizer, nn.utils.get_total_norm(gradients), max_norm):
            optimizer.step()

    expected = trained(optimizer_class, before, **options)
    found = trained(optimizer_class, inside, **options)

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)


def test_nothing_is_left_on_the_optimizer_also_after_an_error():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], fused=True)

    seen = []

    def fails():
        seen.append(float(optimizer.grad_scale))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), clipping_in_step(optimizer, torch.tensor(2.0), 1.0):
        fails()

    assert seen == [pytest.approx(2.0, rel=1e-5)]
    assert not hasattr(optimizer, "grad_scale")


def test_a_norm_that_is_not_finite_is_told():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    with clipping_in_step(optimizer, torch.tensor(math.nan), 1.0) as must_skip:
        assert bool(must_skip)
        assert float(optimizer.grad_scale) == 1.0
    with clipping_in_step(optimizer, torch.tensor(0.5), 1.0) as must_skip:
        assert not bool(must_skip)


@pytest.mark.parametrize(
    ("dtype", "options", "words"),
    [
        (torch.float32, {}, "not fused"),
        (torch.float64, {"fused": True}, "float64"),
    ],
)
def test_an_optimizer_that_would_not_scale_rightly_is_refused(dtype, options, words):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=dtype))], **options)
    with (
        pytest.raises(GuardError, match=words),
        clipping_in_step(optimizer, torch.tensor(1.0), 1.0),
    ):
        pass


def test_an_optimizer_whose_gradients_are_scaled_already_is_refused():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], fused=True)
    optimizer.grad_scale = torch.tensor(8.0)
    with (
        pytest.raises(GuardError, match="unscale"),
        clipping_in_step(optimizer, torch.tensor(1.0), 1.0),
    ):
        pass
