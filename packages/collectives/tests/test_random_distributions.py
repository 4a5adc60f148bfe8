import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives.random import (
    Key,
    bernoulli,
    integers,
    normal,
    permutation,
    uniform,
)
from trainwright.collectives.random.gaussian import cos_sin_turns, log_unit
from trainwright.collectives.shard_spec import Box
from trainwright.collectives.testing.random_oracle import bits_by_the_documented_layout
from trainwright.collectives.testing.values import keys

MANY = 100_000


def correlation(a, b):
    return torch.corrcoef(torch.stack([a, b]))[0, 1].abs().item()


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("draw", [uniform, normal])
def test_lower_precision_draws_are_the_float64_draws_rounded(draw):
    key = Key(9, "w")
    exact = draw(key, (MANY,), dtype=torch.float64)

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        largest = 1.0 - torch.finfo(dtype).eps / 2 if draw is uniform else math.inf
        drawn = draw(key, (MANY,), dtype=dtype)
        assert drawn.dtype == dtype
        assert torch.equal(drawn, exact.to(dtype).clamp(max=largest))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_uniform_number_is_never_one(dtype):
    drawn = uniform(Key(0, "w"), (MANY,), dtype=dtype)

    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.max() > 0.999 - torch.finfo(dtype).eps


def test_logarithm_and_cosine_are_right_to_the_last_bits():
    bits = integers(Key(0, "bits"), (MANY,), 0, 2**53)
    edges = torch.tensor([0, 1, 2**50 - 1, 2**50, 2**51, 2**52, 3 * 2**51, 2**53 - 1])
    bits = torch.cat([bits, edges])
    unit = (bits + 1).double() / 2**53
    angle = bits.numpy().astype(np.longdouble) / np.longdouble(2**53)

    log = log_unit(unit)
    cos, sin = cos_sin_turns(bits)

    exact = np.log(unit.numpy().astype(np.longdouble))
    assert np.max(np.abs(log.numpy() - exact) / np.maximum(np.abs(exact), 1e-30)) < 2.0**-52
    turn = 8 * np.arctan(np.longdouble(1))
    assert np.max(np.abs(cos.numpy() - np.cos(turn * angle))) < 2.0**-52
    assert np.max(np.abs(sin.numpy() - np.sin(turn * angle))) < 2.0**-52
    assert log_unit(torch.ones(1, dtype=torch.float64)).item() == 0


@given(keys())
def test_normal_numbers_are_box_muller_of_the_uniform_numbers_of_their_pair(key):
    u, v = uniform(key, (2,), dtype=torch.float64).tolist()

    drawn = normal(key, (2,), mean=1.0, std=3.0, dtype=torch.float64)

    radius = math.sqrt(-2 * math.log1p(-u))
    pair = (math.cos(2 * math.pi * v), math.sin(2 * math.pi * v))
    # A few roundings of numbers below 30, and the angle's rounding.
    assert drawn.tolist() == pytest.approx([1 + 3 * radius * p for p in pair], rel=0, abs=1e-13)


# ---------------------------------------------------------------- distributions


def distance_from(distribution, sample):
    """Kolmogorov's distance times the root of the sample size: above 1.95 once in a thousand."""
    ordered = distribution(sample.double().sort().values)
    steps = torch.arange(len(sample) + 1, dtype=torch.float64) / len(sample)
    gap = torch.maximum((steps[1:] - ordered).abs().max(), (ordered - steps[:-1]).abs().max())
    return gap.item() * math.sqrt(len(sample))


def test_uniform_numbers_are_uniform_and_normal_numbers_normal():
    key = Key(5, "w")

    flat = uniform(key, (MANY,), dtype=torch.float64)
    bell = normal(key, (MANY,), dtype=torch.float64)

    assert distance_from(lambda x: x, flat) < 1.95
    assert distance_from(torch.special.ndtr, bell) < 1.95
    assert abs(bell.pow(4).mean().item() - 3) < 5 * math.sqrt(96 / MANY)
    assert 4.0 < bell.abs().max().item() < 6.0


def test_neighbours_lanes_names_seeds_and_steps_are_independent():
    base = normal(Key(5, "w", 1), (MANY,), dtype=torch.float64)
    others = [Key(6, "w", 1), Key(5, "v", 1), Key(5, "w", 2), Key(5, "w", 1 + 2**32)]

    bound = 4.5 / math.sqrt(MANY)
    for key in others:
        assert correlation(base, normal(key, (MANY,), dtype=torch.float64)) < bound
    for lag in (1, 2, 3, 64):
        assert correlation(base[lag:], base[:-lag]) < bound
    pairs = base.view(-1, 2)
    assert correlation(pairs[:, 0].abs(), pairs[:, 1].abs()) < bound * math.sqrt(2)


@given(keys(), keys())
def test_different_keys_give_different_numbers(one, other):
    same = torch.equal(uniform(one, (4,)), uniform(other, (4,)))

    assert same == (one == other)


def test_bernoulli_is_exact_at_its_ends_and_right_between():
    key = Key(0, "mask")

    never, always = bernoulli(key, (MANY,), 0.0), bernoulli(key, (MANY,), 1.0)
    rare = bernoulli(key, (MANY,), 0.1, dtype=torch.float32)

    assert never.dtype == torch.bool
    assert not never.any()
    assert always.all()
    assert abs(rare.mean().item() - 0.1) < 5 * math.sqrt(0.09 / MANY)
    below = uniform(key, (MANY,), dtype=torch.float64) < 0.1
    assert torch.equal(rare.bool(), below)


def test_integers_cover_their_range_evenly():
    drawn = integers(Key(0, "tokens"), (MANY,), -3, 4)

    counts = torch.bincount(drawn + 3, minlength=7).double()
    assert drawn.dtype == torch.int64
    # Chi-square with 6 degrees of freedom: above 22.5 once in a thousand.
    assert ((counts - MANY / 7).square() / (MANY / 7)).sum() < 22.5
    assert counts.numel() == 7


def test_integers_of_a_range_that_does_not_divide_the_bits_favour_none():
    # The 2**63 numbers are four thirds of this range: without rejection the first third of it
    # would come up half of the time.
    third = 2**61

    drawn = integers(Key(0, "tokens"), (MANY,), 0, 3 * third)

    assert abs((drawn < third).double().mean().item() - 1 / 3) < 5 * math.sqrt(2 / 9 / MANY)
    assert drawn.max() < 3 * third


@given(keys(), st.integers(0, 100))
def test_a_rejected_integer_is_the_next_attempt_at_its_place(key, index):
    count = 2**62 + 1
    box = Box((index,), (index + 1,))

    drawn = integers(key, (101,), 0, count, box=box).item()

    attempts = (bits_by_the_documented_layout(key, index, a) >> 1 for a in range(64))
    assert drawn == next(bits for bits in attempts if bits < 2**63 - 2**63 % count) % count


def test_integers_reach_the_ends_of_int64():
    wide = integers(Key(0, "w"), (1000,), -(2**63), -1)
    fixed = integers(Key(0, "w"), (3,), 2**63 - 1, 2**63)

    assert wide.max() < -1
    assert wide.double().mean().item() == pytest.approx(-(2.0**62), rel=0.1)
    assert fixed.tolist() == [2**63 - 1] * 3


# ---------------------------------------------------------------- orders


@pytest.mark.parametrize("n", [0, 1, 2, 1000, 1_000_000])
def test_a_permutation_holds_every_number_once(n):
    order = permutation(Key(0, "epoch"), n)

    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(n))


@given(keys(), st.integers(2, 40))
def test_a_permutation_sorts_the_random_numbers_of_its_places(key, n):
    order = permutation(key, n)

    bits = [bits_by_the_documented_layout(key, index) >> 1 for index in range(n)]
    assert order.tolist() == sorted(range(n), key=bits.__getitem__)


def test_all_orders_of_four_are_equally_likely():
    orders = [tuple(permutation(Key(0, "epoch", step), 4).tolist()) for step in range(480)]

    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    # Chi-square with 23 degrees of freedom: above 49.7 once in a thousand.
    assert sum((count - 20) ** 2 / 20 for count in counts) < 49.7
