"""Step for step the schedules of `transformers`; where they differ is named, and can be had."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import optimization

from trainwright.stability_guards import (
    InverseSqrt,
    as_lambda_lr,
    constant,
    half_cosine,
    linear,
    one_minus_sqrt,
    polynomial,
    straight,
    warmup_cosine,
    warmup_stable_decay,
)

PEAK = 0.3


def theirs(make, *lengths, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer, *lengths, **options)
    return lambda update: scheduler.lr_lambdas[0](update) * PEAK


@st.composite
def runs(draw):
    """Draw (schedule from zero, with the rise of this package, theirs, warmup, total)."""
    warmup, rest = draw(st.integers(0, 8)), draw(st.integers(1, 12))
    total = warmup + rest
    decay = draw(st.integers(1, rest))
    power = draw(st.sampled_from([1.0, 2.0, 0.5]))
    shape = draw(st.sampled_from([straight, half_cosine, one_minus_sqrt]))
    kinds = {
        "constant": (
            lambda **o: constant(PEAK, warmup, **o),
            theirs(optimization.get_constant_schedule_with_warmup, warmup),
        ),
        "linear": (
            lambda **o: linear(PEAK, warmup, total, **o),
            theirs(optimization.get_linear_schedule_with_warmup, warmup, total),
        ),
        "cosine": (
            lambda **o: warmup_cosine(PEAK, warmup, total, **o),
            theirs(optimization.get_cosine_schedule_with_warmup, warmup, total),
        ),
        "cosine with a floor": (
            lambda **o: warmup_cosine(PEAK, warmup, total, PEAK / 10, **o),
            theirs(
                optimization.get_cosine_with_min_lr_schedule_with_warmup,
                warmup,
                total,
                min_lr_rate=0.1,
            ),
        ),
        "polynomial": (
            lambda **o: polynomial(PEAK, warmup, total, PEAK / 100, power=power, **o),
            theirs(
                optimization.get_polynomial_decay_schedule_with_warmup,
                warmup,
                total,
                lr_end=PEAK / 100,
                power=power,
            ),
        ),
        "inverse square root": (
            lambda **o: InverseSqrt(PEAK, warmup, **o),
            theirs(optimization.get_inverse_sqrt_schedule, warmup),
        ),
        "warm-up, plateau, decay": (
            lambda **o: warmup_stable_decay(PEAK, warmup, total, decay, shape=shape, **o),
            theirs(
                optimization.get_wsd_schedule,
                warmup,
                decay,
                total,
                decay_type={straight: "linear", half_cosine: "cosine"}.get(shape, "1-sqrt"),
            ),
        ),
    }
    make, other = kinds[draw(st.sampled_from(sorted(kinds)))]
    return make(from_zero=True), make(), other, warmup, total


@given(run=runs())
def test_from_zero_every_update_has_the_rate_that_transformers_gives_it(run):
    ours, _, other, _, total = run

    factor = as_lambda_lr(ours)

    for update in range(total + 1):
        assert factor(update) * PEAK == pytest.approx(other(update), rel=1e-12, abs=1e-15)


@given(run=runs())
def test_by_default_the_rise_is_one_update_ahead_of_transformers_and_the_rest_is_the_same(run):
    _, ours, other, warmup, total = run

    assert ours(0) > 0.0
    for update in range(total + 1):
        ahead = 1 if update < warmup else 0
        assert ours(update) == pytest.approx(other(update + ahead), rel=1e-12, abs=1e-15)


def test_after_its_end_the_cosine_stays_at_its_floor_where_that_of_transformers_rises_again():
    other = theirs(optimization.get_cosine_schedule_with_warmup, 2, 10)

    assert other(14) > PEAK / 10
    assert warmup_cosine(PEAK, 2, 10)(14) == 0.0


def test_a_run_of_no_updates_begins_at_the_peak_where_that_of_transformers_ends_at_zero():
    other = theirs(optimization.get_linear_schedule_with_warmup, 0, 0)

    assert other(0) == 0.0
    assert linear(PEAK, 0, 0)(0) == PEAK
