import hashlib
import math
import random as python_random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives.errors import UsageError
from trainwright.collectives.random import (
    Key,
    bernoulli,
    integers,
    normal,
    normal_at,
    permutation,
    philox_4x32_10,
    uniform,
    uniform_at,
)
from trainwright.collectives.random.gaussian import cos_sin_turns, log_unit
from trainwright.collectives.shard_spec import Box
from trainwright.collectives.testing.values import boxes, keys, shapes

WORD = 2**32
MANY = 100_000
GOLDEN_WORDS = (2944588511, 1408809579)
GOLDEN_UNIFORM = [0.5418919482020655, 0.22674158616733397]
GOLDEN_NORMAL = [0.18195177521259417, 1.2362014216827522]
GOLDEN_ORDER = [4, 1, 5, 0, 3, 2, 7, 6]


def philox_in_plain_python(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], WORD)
        high1, low1 = divmod(0xCD9E8D57 * c[2], WORD)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % WORD, (k[1] + 0xBB67AE85) % WORD]
    return c


def bits_by_the_documented_layout(key, index, attempt=0):
    """The 64 bits of one element, from the module's docstring alone."""
    digest = hashlib.blake2b(key.seed.to_bytes(8, "little") + key.name.encode(), digest_size=8)
    half = digest.digest()
    key_words = [int.from_bytes(half[:4], "little"), int.from_bytes(half[4:], "little")]
    block, lane = divmod(index, 2)
    step_words = [key.step % WORD, key.step // WORD + attempt * 2**16]
    words = philox_in_plain_python([block % WORD, block // WORD, *step_words], key_words)
    return words[2 * lane] * WORD + words[2 * lane + 1]


def draws_of(key, shape, box=None):
    """One draw of every kind, as the function that draws a box of it."""
    return [
        uniform(key, shape, box=box),
        uniform(key, shape, box=box, dtype=torch.float64),
        normal(key, shape, box=box, std=0.02),
        normal(key, shape, box=box, mean=3.0, dtype=torch.bfloat16),
        bernoulli(key, shape, 0.3, box=box),
        integers(key, shape, -5, 8, box=box),
        integers(key, shape, 0, 3 * 2**61, box=box),
    ]


def correlation(a, b):
    return torch.corrcoef(torch.stack([a, b]))[0, 1].abs().item()


# ---------------------------------------------------------------- the generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    assert philox_4x32_10(torch.tensor(counter), torch.tensor(key)).tolist() == list(words)


@given(
    st.lists(st.tuples(*[st.integers(0, WORD - 1)] * 4), min_size=1, max_size=5),
    st.tuples(*[st.integers(0, WORD - 1)] * 2),
)
def test_philox_of_many_counters_is_philox_of_each(counters, key):
    words = philox_4x32_10(torch.tensor(counters), torch.tensor(key))

    assert words.tolist() == [philox_in_plain_python(counter, key) for counter in counters]


def test_philox_broadcasts_keys_and_ignores_bits_beyond_a_word():
    counters = torch.arange(8).reshape(2, 1, 4)
    several = torch.tensor([[1, 2], [3, 4], [5, 6]])

    words = philox_4x32_10(counters + 2**32, several - 2**40)

    assert words.shape == (2, 3, 4)
    assert words[1, 2].tolist() == philox_in_plain_python([4, 5, 6, 7], [5, 6])
    assert counters.flatten().tolist() == list(range(8))


@given(keys(), st.integers(0, 2**62))
@example(Key(2**64 - 1, "", 2**48 - 1), 2**63 - 1)
@example(Key(0, "layers.0.weight", 2**32), 2**33 + 1)
def test_an_element_has_the_bits_that_the_documented_layout_gives_it(key, index):
    drawn = uniform_at(key, torch.tensor(index), dtype=torch.float64)

    assert drawn.item() == (bits_by_the_documented_layout(key, index) >> 11) / 2**53


def test_numbers_never_change_between_versions():
    key = Key(42, "model.layers.0.weight", 7)

    assert key.words == GOLDEN_WORDS
    assert uniform(key, (2,), dtype=torch.float64).tolist() == GOLDEN_UNIFORM
    assert normal(key, (2,), dtype=torch.float64).tolist() == GOLDEN_NORMAL
    assert permutation(key, 8).tolist() == GOLDEN_ORDER


# ---------------------------------------------------------------- by place


@given(st.data())
def test_a_slice_is_computed_without_the_rest_and_equals_the_slice_of_the_whole(data):
    key = data.draw(keys())
    shape = data.draw(shapes(max_dims=4, max_size=6))
    box = data.draw(boxes(shape))

    whole = draws_of(key, shape)
    parts = draws_of(key, shape, box)

    for full, part in zip(whole, parts, strict=True):
        assert part.shape == box.shape
        assert torch.equal(part, full[box.slices])


def test_slices_longer_than_what_is_computed_at_once_equal_those_of_the_whole():
    key, shape = Key(3, "w"), (401, 499)
    long = [
        Box((0, 1), (401, 499)),
        Box((1, 0), (400, 499)),
        Box((7, 3), (390, 252)),
    ]

    whole = draws_of(key, shape)

    for box in long:
        for full, part in zip(whole, draws_of(key, shape, box), strict=True):
            assert torch.equal(part, full[box.slices])


def test_a_slice_of_a_tensor_too_large_to_exist_is_drawn():
    key, shape = Key(0, "w"), (2**30, 2**31)

    corner = normal(key, shape, box=Box((2**30 - 2, 2**31 - 3), (2**30, 2**31)))

    rows = torch.tensor([[2**30 - 2], [2**30 - 1]]) * 2**31
    places = rows + torch.arange(2**31 - 3, 2**31)
    assert torch.equal(corner, normal_at(key, places))
    assert corner.unique().numel() == 6


@given(st.data())
def test_numbers_at_places_are_those_of_the_whole(data):
    key = data.draw(keys())
    places = torch.tensor(
        data.draw(st.lists(st.lists(st.integers(0, 59), min_size=2, max_size=2), max_size=5)),
        dtype=torch.int64,
    )

    whole = uniform(key, (60,)), normal(key, (60,), std=2.0, dtype=torch.float64)
    drawn = uniform_at(key, places), normal_at(key, places, std=2.0, dtype=torch.float64)

    for full, part in zip(whole, drawn, strict=True):
        assert torch.equal(part, full[places])


def test_the_number_of_threads_changes_no_bit():
    key, shape = Key(1, "w"), (300, 701)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = draws_of(key, shape)
        torch.set_num_threads(3)
        together = draws_of(key, shape)
    finally:
        torch.set_num_threads(threads)

    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_no_generator_of_the_process_is_read_or_changed():
    torch.manual_seed(1)
    python_random.seed(1)
    first = draws_of(Key(0, "w"), (50,))
    states = torch.get_rng_state(), python_random.getstate(), np.random.get_state()[1].tolist()
    torch.manual_seed(2)
    after_seed = torch.get_rng_state()
    second = draws_of(Key(0, "w"), (50,))
    permutation(Key(0, "w"), 50)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.get_rng_state(), after_seed)
    assert states[1:] == (python_random.getstate(), np.random.get_state()[1].tolist())
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), states[0])


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


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Key(-1, "w"), r"seed must be 0 to 2\*\*64 - 1, got -1"),
        (lambda: Key(2**64, "w"), "seed"),
        (lambda: Key(0.5, "w"), "seed must be an integer"),
        (lambda: Key(0, "w", 2**48), "step"),
        (lambda: Key(0, b"w"), "name must be a string"),
        (lambda: uniform(Key(0, "w"), (3,), dtype=torch.int64), "floating-point"),
        (lambda: uniform(Key(0, "w"), (3,), box=Box((0,), (4,))), "does not lie within"),
        (lambda: normal(Key(0, "w"), (3,), std=-1.0), "std must not be negative"),
        (lambda: normal(Key(0, "w"), (3,), std=math.nan), "std must not be negative"),
        (lambda: normal_at(Key(0, "w"), torch.zeros(3)), "indices must be int64"),
        (lambda: bernoulli(Key(0, "w"), (3,), 1.5), "between 0 and 1, got 1.5"),
        (lambda: bernoulli(Key(0, "w"), (3,), math.nan), "between 0 and 1"),
        (lambda: integers(Key(0, "w"), (3,), 4, 4), "high - low"),
        (lambda: integers(Key(0, "w"), (3,), 0, 2**63), "high - low"),
        (lambda: integers(Key(0, "w"), (3,), 0, 257, dtype=torch.uint8), "0 to 255"),
        (lambda: integers(Key(0, "w"), (3,), 0, 2, dtype=torch.float32), "integer one"),
        (lambda: permutation(Key(0, "w"), -1), "n >= 0"),
        (lambda: philox_4x32_10(torch.zeros(4), torch.zeros(2).long()), "counter must be int64"),
        (lambda: philox_4x32_10(torch.zeros(4).long(), torch.zeros(4).long()), "key must be"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_the_reason(make, message):
    with pytest.raises(UsageError, match=message):
        make()
