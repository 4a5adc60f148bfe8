"""Schedules are pure, bounded, defined everywhere, and torch's where torch has them."""

import math
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from trainwright.stability_guards import (
    GuardError,
    as_lambda_lr,
    constant,
    linear,
    warmup_cosine,
)
from trainwright.stability_guards.testing import SCHEDULE_LAWS, warmup_lengths

FALLING = {"linear": linear, "cosine": warmup_cosine}
peaks = st.floats(1e-6, 10.0)


@pytest.mark.parametrize("law", SCHEDULE_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", FALLING)
@given(lengths=warmup_lengths(), peak=peaks, part=st.sampled_from([0.0, 0.1, 1 / 3, 1.0]))
@example(lengths=(0, 0), peak=1.0, part=0.1)
@example(lengths=(3, 10), peak=0.1, part=0.0)
def test_every_falling_schedule_keeps_the_law(law, name, lengths, peak, part):
    law(FALLING[name](peak, *lengths, peak * part))


@pytest.mark.parametrize("law", SCHEDULE_LAWS, ids=lambda law: law.__name__)
@given(warmup_steps=st.integers(0, 30), peak=peaks)
def test_the_constant_schedule_keeps_the_law(law, warmup_steps, peak):
    law(constant(peak, warmup_steps))


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("lengths", [(0, 10), (1, 10), (10, 10), (0, 1), (0, 0)])
def test_degenerate_lengths_have_defined_rates(name, lengths):
    schedule = FALLING[name](1.0, *lengths, 0.1)

    rates = [schedule(update) for update in range(16)]

    assert all(0.0 <= rate <= 1.0 for rate in rates)
    if lengths[0] == 0:
        assert rates[0] == 1.0
    if lengths == (10, 10):
        assert rates[9:11] == [1.0, 0.1]


@pytest.mark.parametrize(
    "schedule", [constant(1.0, 4), linear(1.0, 4, 9), warmup_cosine(1.0, 4, 9)]
)
def test_no_update_of_the_rise_has_rate_zero_and_its_last_has_the_peak(schedule):
    assert [schedule(update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_first_rate_is_the_peak_over_the_length_of_the_rise():
    assert constant(8e-4, 5)(0) == pytest.approx(1.6e-4)


def test_the_hand_over_to_the_cosine_never_passes_the_peak():
    schedule = warmup_cosine(1.0, 3, 10)

    assert max(schedule(update) for update in range(20)) == 1.0


def test_the_cosine_is_half_way_in_the_middle_and_holds_its_floor():
    schedule = warmup_cosine(1.0, 10, 110, 0.2)

    assert schedule(60) == pytest.approx(0.6)
    assert [schedule(update) for update in (109, 110, 111, 10**9)][1:] == [0.2] * 3
    assert schedule(109) > 0.2


@given(steps=st.integers(1, 50), peak=peaks, part=st.sampled_from([0.0, 0.3]))
def test_without_a_rise_the_cosine_is_torchs(steps, peak, part):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=peak * part)
    ours = warmup_cosine(peak, 0, steps, peak * part)

    for update in range(steps):
        # torch multiplies its way along, an error of some roundings a step.
        assert theirs.get_last_lr()[0] == pytest.approx(ours(update), rel=1e-9, abs=1e-12 * peak)
        optimizer.step()
        theirs.step()


def test_a_lambda_lr_scheduler_stepped_on_applied_updates_only_keeps_in_phase():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, as_lambda_lr(constant(1.0, 10)))

    for step in range(10):
        if step not in (3, 7):
            optimizer.step()
            scheduler.step()

    assert scheduler.last_epoch == 8
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9)


@given(stop=st.integers(0, 12))
def test_a_lambda_lr_scheduler_resumes_where_it_was(stop):
    schedule = warmup_cosine(0.3, 3, 10, 0.01)

    def run(state, steps):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, as_lambda_lr(schedule))
        if state is not None:
            scheduler.load_state_dict(state)
        rates = []
        for _ in range(steps):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return rates, scheduler.state_dict()

    whole, _ = run(None, 12)
    first, state = run(None, stop)
    second, _ = run(state, 12 - stop)

    assert first + second == whole
    assert whole == pytest.approx([schedule(update) for update in range(12)])


def test_groups_with_another_rate_keep_their_ratio():
    optimizer = torch.optim.SGD(
        [
            {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.3},
            {"params": [nn.Parameter(torch.zeros(1))], "lr": 0.6},
        ]
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, as_lambda_lr(linear(0.3, 3, 10)))

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.2])


def test_schedules_are_values():
    schedule = warmup_cosine(1.0, 3, 10)

    assert schedule == warmup_cosine(1.0, 3, 10)
    assert schedule != linear(1.0, 3, 10)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert repr(schedule) == (
        "WarmupSchedule(peak=1.0, warmup_steps=3, total_steps=10, floor=0.0, shape=half_cosine, "
        "hold_steps=0, from_zero=False)"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: warmup_cosine(1.0, 1.0, 10), "warmup_steps must be a whole number.*fraction"),
        (lambda: warmup_cosine(1.0, True, 10), "warmup_steps must be a whole number"),
        (lambda: linear(1.0, 0, -1), "total_steps must be a whole number"),
        (lambda: linear(1.0, 11, 10), "warmup_steps must be at most total_steps=10, got 11"),
        (lambda: linear(1.0, 0, 10, 2.0), r"floor must be at most peak=1\.0, got 2\.0"),
        (lambda: linear(1.0, 0, 10, -0.1), "floor must be from 0"),
        (lambda: constant(-1.0), "peak must be from 0"),
        (lambda: constant(math.inf), "peak must be from 0 and finite"),
        (lambda: constant(1.0)(-1), "counted from 0, got -1"),
        (lambda: as_lambda_lr(constant(0.0)), "peak above 0"),
    ],
)
def test_what_makes_no_schedule_is_refused(make, message):
    with pytest.raises(GuardError, match=message):
        make()
