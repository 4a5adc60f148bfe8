"""Encoding rounds exactly as PyTorch, ml_dtypes and the definition do."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Box
from trainwright.collectives.random import Key
from trainwright.precision import PrecisionError
from trainwright.precision.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    Stochastic,
    by_draws,
    toward_zero,
)

SIGNED = [format for format in FORMATS if format.signed and format.bits <= 16]
CAST = [format for format in FORMATS if format.dtype and format is not E2M1]
ML_NAMES = {
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "float8_e4m3fnuz": E4M3FNUZ,
    "float8_e5m2fnuz": E5M2FNUZ,
    "float6_e3m2fn": E3M2,
    "float6_e2m3fn": E2M3,
    "float4_e2m1fn": E2M1,
    "float8_e8m0fnu": E8M0,
    "bfloat16": BF16,
}
PUBLISHED = json.loads((Path(__file__).parent / "published_formats.json").read_text())
ROUNDED = [record for record in PUBLISHED if record["id"].startswith("rnd.")]


def by_name(format):
    return getattr(format, "name", None)


def magnitudes(format):
    """Return the numbers of the codes without sign, and the one that would be next."""
    points = format.code_points()[: format.max_code + 1]
    return torch.cat((points, 2 * points[-1:] - points[-2:-1]))


def edges(format):
    """Return, as float64, numbers, the middles of neighbours, and what lies just beside both."""
    numbers = magnitudes(format)
    middles = (numbers[1:] + numbers[:-1]) / 2
    exact = torch.cat((numbers, middles, torch.tensor([0.0, math.inf]).double()))
    inf = torch.tensor(math.inf)
    near = [torch.nextafter(exact.float(), to).double() for to in (inf, -inf)]
    nearer = [torch.nextafter(exact, to.double()) for to in (inf, -inf)]
    values = torch.cat((exact, *near, *nearer))
    return torch.cat((values, -values, torch.tensor([math.nan, -math.nan]).double()))


def drawn_floats(seed, dtype):
    """Return floats of random bits: all exponents, subnormals, infinities and NaNs alike."""
    generator = np.random.default_rng(seed)
    if dtype is torch.float64:
        narrow = generator.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
        with np.errstate(invalid="ignore"):
            offsets = 1 + generator.integers(-3, 4, 20_000) * 2.0**-50
            return torch.from_numpy(narrow.astype(np.float64) * offsets)
    return torch.from_numpy(generator.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32))


def round_by_definition(format, values, *, nearest):
    """Return magnitude codes by a search for the neighbours, from the table of numbers alone."""
    numbers = magnitudes(format)
    magnitude = values.abs().double()
    below = torch.searchsorted(numbers, magnitude, right=True) - 1
    inside = below.clamp(max=len(numbers) - 2)
    middle = (numbers[inside] + numbers[inside + 1]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (inside % 2 == 1))
    return inside + (up if nearest else magnitude >= numbers[-1])


def assert_rounds_by_definition(format, values):
    values = values[~values.isnan()]
    for nearest in (True, False):
        rounding = {} if nearest else {"rounding": toward_zero}
        expected = round_by_definition(format, values, nearest=nearest)
        found = format.encode_clamped(values, **rounding).long()
        magnitude = found & ((1 << (format.bits - 1)) - 1)
        zero_without_sign = (expected == 0) & (format in (E4M3FNUZ, E5M2FNUZ))
        assert torch.equal(magnitude, expected.clamp(max=format.max_code))
        assert torch.equal(found != magnitude, values.signbit() & ~zero_without_sign)


@pytest.mark.parametrize("format", SIGNED, ids=by_name)
def test_each_number_middle_and_neighbour_rounds_to_the_nearer_even_at_a_tie(format):
    values = edges(format)
    assert_rounds_by_definition(format, values)
    assert_rounds_by_definition(format, values.float())


@settings(max_examples=3)
@given(seed=st.integers(0, 2**32), format=st.sampled_from(SIGNED))
def test_drawn_floats_round_by_definition(seed, format):
    assert_rounds_by_definition(format, drawn_floats(seed, torch.float32))
    assert_rounds_by_definition(format, drawn_floats(seed, torch.float64))


@pytest.mark.parametrize("format", CAST, ids=by_name)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_saturating_codes_are_those_of_torchs_casts(format, source):
    around = edges(BF16 if format is FP32 else format) if format.signed else scales_and_middles()
    values = torch.cat((around.float(), drawn_floats(1, torch.float32))).to(source)
    expected = format.codes_of(values.to(format.dtype))

    found = format.encode(values)

    # Casts to 16 bits and more keep or change the payload of a NaN from one lane to the next.
    is_nan = values.isnan()
    assert format.decode(found)[is_nan].isnan().all()
    compared = torch.ones_like(is_nan)
    if format.bits > 8 or source is torch.bfloat16:
        compared = ~is_nan
    assert torch.equal(found[compared], expected[compared])


@pytest.mark.parametrize("name", ML_NAMES)
def test_codes_that_do_not_saturate_are_those_of_ml_dtypes(name):
    ml_dtypes = pytest.importorskip("ml_dtypes", exc_type=ImportError)
    format = ML_NAMES[name]
    around = edges(format) if format.signed else scales_and_middles()
    values = torch.cat((around.float(), drawn_floats(2, torch.float32)))
    unsigned = np.uint16 if format.bits == 16 else np.uint8
    with np.errstate(all="ignore"):
        expected = values.numpy().astype(getattr(ml_dtypes, name)).view(unsigned)
    points = np.arange(1 << format.bits, dtype=unsigned).view(getattr(ml_dtypes, name))

    found = format.encode(values, saturate=False)

    assert found.tolist() == expected.tolist()
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(format.code_points().numpy(), points.astype(np.float64))


def scales_and_middles():
    points = E8M0.code_points()[:255]
    inf = torch.tensor(math.inf)
    around = torch.cat((points.float(), 1.5 * points.float()))
    near = [torch.nextafter(around, to) for to in (inf, -inf)]
    special = torch.tensor([0.0, math.inf, math.nan, 1e-45, 3.4e38])
    values = torch.cat((around, *near, special))
    return torch.cat((values, -values))


@pytest.mark.parametrize("record", ROUNDED, ids=lambda record: record["id"])
def test_published_casts_are_reproduced(record):
    format = {"float8_e4m3fn": E4M3, "float8_e8m0fnu": E8M0}[record["inputs"]["dtype"]]
    expected = record["outputs"]["cast"]

    found = format.decode(format.encode(torch.tensor([float(record["inputs"]["x"])])))

    assert math.isnan(found) if expected is None else float(found) == expected
    assert expected is None or math.copysign(1, float(found)) == math.copysign(1, expected)


@pytest.mark.parametrize("format", [*SIGNED, FP32, E8M0], ids=by_name)
def test_a_float64_number_next_to_a_middle_is_not_rounded_twice(format):
    # In float32 it would be the middle itself, which then goes to the even neighbour.
    lower, upper = 1.0, 1.0 + format.eps
    middle = (lower + upper) / 2
    values = torch.tensor([middle - 2.0**-40, middle + 2.0**-40], dtype=torch.float64)

    found = format.decode(format.encode(values), dtype=torch.float64)

    assert found.tolist() == [lower, upper]


@pytest.mark.parametrize(
    ("format", "large", "true", "false"),
    [
        (E4M3, 465.0, 0x7E, 0x7F),
        (E4M3, math.inf, 0x7E, 0x7F),
        (E5M2, 61440.0, 0x7C, 0x7C),
        (E5M2, math.inf, 0x7C, 0x7C),
        (FP16, 65520.0, 0x7C00, 0x7C00),
        (E4M3FNUZ, 248.0, 0x80, 0x80),
        (E3M2, math.inf, 0x1F, 0x1F),
        (E2M3, 9.0, 0x1F, 0x1F),
        (E2M1, 7.0, 0x7, 0x7),
        (E8M0, math.inf, 0xFF, 0xFF),
        (E8M0, 0.0, 0x00, 0xFF),
        (E8M0, -4.0, 129, 0xFF),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_is_too_large_saturates_where_torch_does_or_becomes_what_ml_dtypes_makes_of_it(
    format, large, true, false
):
    values = torch.tensor([large])
    assert format.encode(values, saturate=True).tolist() == [true]
    assert format.encode(values, saturate=False).tolist() == [false]
    clamped = format.decode(format.encode_clamped(values))
    assert not format.signed or clamped.tolist() == [format.max]


def every_draw(bits):
    return torch.arange(1 << bits) << (53 - bits)


def mean_of_every_draw(format, value, bits):
    """Return the exact mean of rounding ``value`` by each of the draws of so many bits."""
    draws = every_draw(bits)

    def rounding(significand, shift, first):
        return by_draws(significand, shift, draws[first : first + len(significand)])

    values = torch.full((len(draws),), value, dtype=torch.float64)
    numbers = format.decode(format.encode_clamped(values, rounding=rounding), dtype=torch.float64)
    assert len(numbers.unique()) <= 2
    return float(numbers.mean())


@pytest.mark.parametrize(
    ("format", "value", "bits"),
    [
        (BF16, 1 + 2.0**-9, 16),
        (BF16, float(np.float32(math.pi)), 16),
        (BF16, -float(np.float32(1e-39)), 16),
        (FP16, float(np.float32(math.e)), 13),
        (FP16, -1000 * 2.0**-30, 16),
        (E4M3, 1.71875, 10),
        (E4M3, 5 * 2.0**-14, 10),
        (E4M3, 3 * 2.0**-22, 14),
        (E5M2, 100.5, 10),
        (E3M2, 0.01, 53 - 40),
        (E2M1, 0.375, 8),
        (E8M0, 1.25, 10),
        (E4M3, 448.0, 8),
        (FP32, 1 + 5 * 2.0**-30, 10),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_mean_of_all_draws_is_the_value_itself(format, value, bits):
    mean = mean_of_every_draw(format, value, bits)
    # 0.01 has more digits than draws are tried.
    error = 2.0**-bits * format.min_subnormal if value == 0.01 else 0
    assert abs(mean - value) <= error


def test_a_tiny_value_rounds_up_as_rarely_as_its_part_of_the_smallest_number():
    draws = torch.tensor([0, 2**53 - 2**13 - 1, 2**53 - 2**13, 2**53 - 1])

    def rounding(significand, shift, first):
        return by_draws(significand, shift, draws)

    found = E4M3.encode(torch.full((4,), 2.0**-49), rounding=rounding)

    # 2**-49 is 2**-40 of the smallest number: the highest 2**13 of 2**53 draws.
    assert found.tolist() == [0, 0, 1, 1]


def test_stochastic_rounding_moves_what_nearest_rounding_leaves_where_it_is():
    value, spacing = 1 + 2**-9, 2**-7
    draw = Stochastic(Key(7, "weight", 3))
    numbers = BF16.decode(BF16.encode(torch.full((100_000,), value), rounding=draw))

    assert set(numbers.tolist()) == {1.0, 1.0 + spacing}
    # A quarter of them: the standard deviation of the mean is 1.07e-5.
    assert float(numbers.double().mean()) == pytest.approx(value, abs=1e-4)
    negative = BF16.encode(torch.full((1000,), -value), rounding=draw)
    assert torch.equal(BF16.decode(negative), -numbers[:1000])
    exact = torch.tensor([1.5, 0.0, -0.0, math.inf, -math.inf, math.nan])
    kept = BF16.decode(BF16.encode(exact, rounding=draw))
    torch.testing.assert_close(kept, exact, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=10)
@given(data=st.data())
def test_a_shard_draws_what_that_part_of_the_whole_tensor_draws(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    start = [data.draw(st.integers(0, size)) for size in shape]
    stop = [data.draw(st.integers(low, size)) for low, size in zip(start, shape, strict=True)]
    box = Box(start, stop)
    first = data.draw(st.integers(0, box.numel))
    key = Key(1, "weight")
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(shape))
    whole = E4M3.encode(values, rounding=Stochastic(key))

    part = values[box.slices].reshape(-1)[first:]
    found = E4M3.encode(part, rounding=Stochastic(key, shape, box, first))

    assert torch.equal(found, whole[box.slices].reshape(-1)[first:])
    again = E4M3.encode(values, rounding=Stochastic(key, shape))
    assert torch.equal(again, whole)


def test_pieces_of_a_large_tensor_continue_the_draws_and_other_keys_draw_others():
    values = torch.full((140_000,), 1.03)
    draw = Stochastic(Key(0, "w"))
    whole = E4M3.encode(values, rounding=draw)

    tail = E4M3.encode(values[130_000:], rounding=Stochastic(Key(0, "w"), start=130_000))

    assert torch.equal(tail, whole[130_000:])
    for key in (Key(1, "w"), Key(0, "v"), Key(0, "w", 1)):
        assert not torch.equal(E4M3.encode(values, rounding=Stochastic(key)), whole)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: Stochastic(Key(0, "w"), start=-1), "not be negative"),
        (lambda: Stochastic(Key(0, "w"), box=Box((0,), (2,))), "needs the shape"),
        (lambda: Stochastic(Key(0, "w"), (4,), Box((3,), (5,))), "not within"),
        (lambda: Stochastic(Key(0, "w"), (4, 4), Box((3,), (4,))), "not within"),
        (
            lambda: E4M3.encode(torch.ones(5), rounding=Stochastic(Key(0, "w"), (4,))),
            "elements 0 to 4 .* has only",
        ),
    ],
)
def test_places_that_are_not_in_the_tensor_are_refused(mistake, says):
    with pytest.raises(PrecisionError, match=says):
        mistake()
