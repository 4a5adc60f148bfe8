"""Schedules by tokens are those by updates; chains, transitions and ramps count exactly."""

import itertools
import math
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from trainwright.stability_guards import (
    BatchRamp,
    Chain,
    GuardError,
    InverseSqrt,
    OverRamp,
    Power,
    SquareOf,
    Transition,
    as_lambda_lr,
    chain,
    constant,
    fixed_batch,
    half_cosine,
    linear,
    linear_ramp,
    one_minus_sqrt,
    polynomial,
    stepwise_ramp,
    warmup_cosine,
    warmup_stable_decay,
)
from trainwright.stability_guards.testing import (
    SCHEDULE_LAWS,
    law_an_update_is_a_span_of_one,
    law_consumption_is_the_sum_of_sizes,
    law_tokens_schedule_as_updates_do,
    warmup_lengths,
)

SHAPES = [one_minus_sqrt, half_cosine, Power(2.0), Power(0.5)]


@st.composite
def scaled(draw):
    """Draw a function of n that makes a schedule whose lengths are n times as long."""
    warmup, total = draw(warmup_lengths())
    decay = draw(st.integers(0, total - warmup))
    scale = draw(st.integers(1, 9))
    from_zero = draw(st.booleans())
    return draw(
        st.sampled_from(
            [
                lambda n: constant(0.3, warmup * n, from_zero=from_zero),
                lambda n: linear(0.3, warmup * n, total * n, 0.1, from_zero=from_zero),
                lambda n: warmup_cosine(0.3, warmup * n, total * n, from_zero=from_zero),
                lambda n: polynomial(0.3, warmup * n, total * n, power=2.0),
                lambda n: warmup_stable_decay(0.3, warmup * n, total * n, decay * n, 0.01),
                lambda n: InverseSqrt(0.3, warmup * n, scale * n, from_zero=from_zero),
                lambda n: Transition(0.1, 0.3, warmup * n, decay * n, half_cosine),
                lambda n: SquareOf(linear(0.3, warmup * n, total * n)),
                lambda n: chain((constant(0.2, warmup * n), decay * n), last=constant(0.1)),
            ]
        )
    )


@given(make=scaled(), batch=st.integers(1, 5000))
def test_a_schedule_of_tokens_is_that_of_updates_where_batches_are_of_one_size(make, batch):
    over_ramp = OverRamp(make(batch), fixed_batch(batch))

    law_tokens_schedule_as_updates_do(make, batch)
    for schedule in (make(1), over_ramp):
        law_an_update_is_a_span_of_one(schedule)

    assert [over_ramp(update) for update in range(45)] == [make(1)(k) for k in range(45)]
    assert over_ramp.peak == make(1).peak


@given(make=scaled())
def test_every_schedule_is_a_value_that_pickles_and_a_factor_below_one(make):
    schedule = make(1)

    assert schedule == make(1)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert all(0.0 <= as_lambda_lr(schedule)(update) <= 1.0 for update in range(45))


@pytest.mark.parametrize("law", SCHEDULE_LAWS, ids=lambda law: law.__name__)
@given(lengths=warmup_lengths(), part=st.floats(0.0, 1.0), shape=st.sampled_from(SHAPES))
@example(lengths=(0, 0), part=0.0, shape=one_minus_sqrt)
def test_warmup_stable_decay_keeps_the_law(law, lengths, part, shape):
    warmup, total = lengths
    decay = math.floor((total - warmup) * part)
    law(warmup_stable_decay(0.7, warmup, total, decay, 0.1, shape=shape))


def test_the_plateau_has_the_peak_and_the_fall_begins_where_it_ends():
    schedule = warmup_stable_decay(1.0, 2, 10, 4, shape=one_minus_sqrt)

    rates = [schedule(update) for update in range(12)]

    assert rates[:7] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert rates[7:] == pytest.approx([0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0, 0.0])


def test_the_inverse_square_root_falls_by_it_and_holds_its_floor():
    schedule = InverseSqrt(1.0, 100, floor=0.2)

    assert [schedule(update) for update in (0, 99, 100, 400)] == [0.01, 1.0, 1.0, 0.5]
    assert schedule(10**9) == 0.2
    assert InverseSqrt(1.0, 0)(0) == 1.0


@given(cuts=st.lists(st.integers(0, 6), max_size=3))
def test_a_chain_gives_each_part_its_own_count(cuts):
    parts = [(linear(0.5 + i, 0, 5), cut) for i, cut in enumerate(cuts)]
    last = constant(0.1, 2)
    schedule = chain(*parts, last=last)

    expected = [rates(k) for rates, cut in parts for k in range(cut)]
    expected += [last(k) for k in range(4)]

    assert [schedule(update) for update in range(len(expected))] == expected
    if not parts:
        assert schedule is last
    nested = chain((schedule, len(expected)), last=last)
    assert [nested(update) for update in range(len(expected))] == expected


def test_the_shrink_factor_of_glm_130b_is_a_chain_of_one_transition():
    alpha = Transition(0.1, 1.0, begin=6000, length=500)

    assert [alpha(step) for step in (0, 6000, 6250, 6500, 10**6)] == pytest.approx(
        [0.1, 0.1, 0.55, 1.0, 1.0]
    )
    assert Transition(1.0, 0.5, 3, 0)(2) == 1.0
    assert Transition(1.0, 0.5, 3, 0)(3) == 0.5


@given(stop=st.integers(0, 15))
def test_a_chain_over_a_ramp_resumes_as_lambda_lr(stop):
    ramp = stepwise_ramp(4, 16, 4, 40)
    schedule = OverRamp(chain((linear(0.3, 10, 60, 0.1), 60), last=InverseSqrt(0.1, 0)), ramp)

    def run(state, updates):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, as_lambda_lr(schedule))
        if state is not None:
            scheduler.load_state_dict(state)
        rates = []
        for _ in range(updates):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return rates, scheduler.state_dict()

    whole, _ = run(None, 15)
    first, state = run(None, stop)
    second, _ = run(state, 15 - stop)

    assert first + second == whole
    assert whole == pytest.approx([schedule(update) for update in range(15)])


@st.composite
def ramps(draw):
    first, step, stages = (draw(st.integers(1, 9)) for _ in range(3))
    over = draw(st.integers(0, 200))
    if draw(st.booleans()):
        return stepwise_ramp(first, first + step * stages, step, over)
    return linear_ramp(first * step, (first + stages) * step, over, step)


@given(ramp=ramps(), total=st.integers(0, 400))
def test_what_a_ramp_says_is_consumed_is_the_sum_of_its_batches(ramp, total):
    law_consumption_is_the_sum_of_sizes(ramp)

    updates = ramp.updates(total)
    assert ramp.consumed(updates) >= total
    assert updates == 0 or ramp.consumed(updates - 1) < total
    sizes = [ramp.size(update) for update in range(60)]
    assert sizes == sorted(sizes)
    assert BatchRamp(ramp.stages) == ramp == pickle.loads(pickle.dumps(ramp))


@given(
    first=st.integers(1, 5),
    increments=st.integers(1, 6),
    step=st.integers(1, 4),
    over=st.integers(1, 60),
)
def test_a_stepwise_ramp_is_that_of_megatron_and_a_linear_one_the_line_rounded_down(
    first, increments, step, over
):
    stepwise = stepwise_ramp(first, first + increments * step, step, over)
    low, high = first * step, (first + increments) * step
    line = linear_ramp(low, high, over, step)

    for at in range(over + 3):
        begun = min(at * increments // over, increments)
        assert stepwise.size_at(at) == first + begun * step
        reached = low + (high - low) * min(at, over) // over
        assert line.size_at(at) == reached // step * step


def test_the_ramp_of_gpt_3_in_tokens_keeps_whole_sequences_and_exact_counts():
    ramp = linear_ramp(16 * 2048, 1536 * 2048, 12 * 10**9, multiple_of=16 * 2048)
    updates = ramp.updates(300 * 10**9)

    assert ramp.size(0) == 16 * 2048
    assert ramp.size(updates - 1) == 1536 * 2048
    assert ramp.consumed(updates) == sum(ramp.size(k) for k in range(updates))
    assert all(size % (16 * 2048) == 0 for _, size in ramp.stages)
    # Of two batch sizes each mean is between them: more updates than at the greater all along.
    assert 300 * 10**9 / (1536 * 2048) < updates < 300 * 10**9 / (1536 * 2048) + 12 * 10**9 / 32768


def test_a_ramp_of_no_length_has_its_last_size_at_once():
    for ramp in (stepwise_ramp(2, 8, 2, 0), linear_ramp(2, 8, 0, 2), fixed_batch(8)):
        assert [ramp.size(update) for update in range(3)] == [8, 8, 8]
    for ramp in (stepwise_ramp(8, 8, 3, 50), linear_ramp(8, 8, 50)):
        assert ramp == fixed_batch(8)


def test_an_update_of_a_warmup_by_tokens_never_has_rate_zero_and_never_passes_the_peak():
    schedule = warmup_cosine(6e-5, 375 * 10**6, 260 * 10**9, 6e-6)
    ramp = linear_ramp(32_768, 3_145_728, 4 * 10**9, 32_768)

    rates = [OverRamp(schedule, ramp)(update) for update in range(12_000)]

    assert rates[0] == pytest.approx(6e-5 * 32_768 / 375e6)
    assert max(rates) == 6e-5
    assert all(a <= b for a, b in itertools.pairwise(rates[: rates.index(6e-5) + 1]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: warmup_stable_decay(1.0, 5, 10, 6), "at most total_steps=10, got 5 \\+ 6"),
        (lambda: warmup_stable_decay(1.0, 5, 10, -6), "must be at most|whole number"),
        (lambda: InverseSqrt(1.0, 4, 0), "timescale must be at least 1, got 0"),
        (lambda: InverseSqrt(1.0, 4, floor=2.0), "floor must be at most peak"),
        (lambda: Power(0.0), "power must be positive"),
        (lambda: Transition(-1.0, 1.0, 0, 1), "first must be from 0"),
        (lambda: Chain(()), "all parts but the last need a length"),
        (lambda: chain((constant(1.0), -1), last=constant(1.0)), "length from 0, got"),
        (lambda: constant(1.0).over(3, 3), "at least one unit, got from 3 to 3"),
        (lambda: stepwise_ramp(2, 9, 2, 10), "must be a multiple of increment=2, got 9 - 2 = 7"),
        (lambda: stepwise_ramp(0, 9, 2, 10), "first must be a whole number from 1"),
        (lambda: stepwise_ramp(9, 2, 1, 10), "last must be at least first=9"),
        (lambda: linear_ramp(2, 9, 10, 2), "multiples of multiple_of=2, got 2 and 9"),
        (lambda: linear_ramp(2, 8, -1), "over must be a whole number of units from 0"),
        (lambda: BatchRamp(((1, 2),)), "stages must begin at 0 and rise"),
        (lambda: BatchRamp(((0, 0),)), "sizes must be at least 1"),
        (lambda: fixed_batch(1).size(-1), "counted from 0, got -1"),
        (lambda: fixed_batch(1).size_at(-1), "consumed must be from 0"),
        (lambda: fixed_batch(1).updates(-1), "total must be from 0"),
    ],
)
def test_what_makes_no_schedule_or_ramp_is_refused(make, words):
    with pytest.raises(GuardError, match=words):
        make()
