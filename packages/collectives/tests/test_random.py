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
    words,
)
from trainwright.collectives.shard_spec import Box
from trainwright.collectives.testing.random_oracle import (
    bits_by_the_documented_layout,
    philox_in_plain_python,
)
from trainwright.collectives.testing.values import boxes, keys, shapes

WORD = 2**32
GOLDEN_WORDS = (2944588511, 1408809579)
GOLDEN_WORDS_HIGH = [35513, 32348, 14859, 15195]
GOLDEN_UNIFORM = [0.5418919482020655, 0.22674158616733397]
GOLDEN_NORMAL = [0.18195177521259417, 1.2362014216827522]
GOLDEN_ORDER = [4, 1, 5, 0, 3, 2, 7, 6]


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
        words(key, shape, box=box),
    ]


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


@given(keys(), st.integers(0, 2**62))
@example(Key(0, "layers.0.weight", 2**32), 2**34 + 3)
def test_four_elements_share_a_block_where_32_bits_are_drawn(key, index):
    drawn = words(key, (index + 1,), box=Box((index,), (index + 1,)))

    joined = bits_by_the_documented_layout(key, index // 2)
    assert drawn.item() == (joined % WORD if index % 2 else joined // WORD)


def test_numbers_never_change_between_versions():
    key = Key(42, "model.layers.0.weight", 7)

    assert key.words == GOLDEN_WORDS
    assert uniform(key, (2,), dtype=torch.float64).tolist() == GOLDEN_UNIFORM
    assert normal(key, (2,), dtype=torch.float64).tolist() == GOLDEN_NORMAL
    assert permutation(key, 8).tolist() == GOLDEN_ORDER
    assert (words(key, (4,)) >> 16).tolist() == GOLDEN_WORDS_HIGH


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
    key, shape = Key(3, "w"), (211, 401)
    long = [
        Box((0, 1), (211, 401)),
        Box((1, 0), (210, 401)),
        Box((7, 3), (209, 252)),
        Box((2, 0), (209, 351)),
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
