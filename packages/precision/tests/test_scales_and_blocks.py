"""Every finite tensor has finite positive scales, and blocks come back within a rounding."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Box
from trainwright.collectives.random import Key, normal
from trainwright.precision import PrecisionError
from trainwright.precision.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E4M3FNUZ,
    E5M2,
    E8M0,
    Stochastic,
    amax,
    ceil_exponent,
    encode_scaled,
    floor_exponent,
    nearest_even,
    pieces,
    quantize_blockwise,
    quantize_mx,
    quantize_nvfp4,
    scale_from_amax,
    toward_zero,
)

ELEMENTS = (E4M3, E5M2, E4M3FNUZ, E3M2, E2M3, E2M1)
RULES = (floor_exponent, ceil_exponent)
PUBLISHED = {
    record["id"]: record
    for record in json.loads((Path(__file__).parent / "published_formats.json").read_text())
}
MX_SCALES = [record for name, record in PUBLISHED.items() if name.startswith("mxscale.")]


def by_name(value):
    return getattr(value, "name", None) or getattr(value, "__name__", None)


def drawn(shape, seed=0, dtype=torch.float32):
    """Return normal numbers whose size differs from row to row by powers of two."""
    values = normal(Key(seed, "values"), shape, dtype=torch.float64)
    rows = normal(Key(seed, "rows"), (*shape[:-1], 1), std=2.0, dtype=torch.float64)
    return (values * torch.exp2(rows.round())).to(dtype)


def test_amax_is_zero_of_nothing_and_nan_of_nan():
    tensor = torch.tensor([[1.0, -3.0], [math.nan, 2.0], [math.inf, 0.0]])
    assert amax(tensor[:1]).item() == 3.0
    assert amax(tensor, 1)[1:].isnan().tolist() == [True, False]
    assert amax(tensor, 1, keepdim=True).shape == (3, 1)
    assert amax(tensor, (0, 1)).isnan()
    assert amax(tensor[2]).item() == math.inf
    assert amax(torch.empty(0)).item() == 0.0
    assert amax(torch.empty(2, 0), 1).tolist() == [0.0, 0.0]
    assert amax(torch.empty(0, 2), keepdim=True).tolist() == [[0.0]]
    assert amax(tensor.bfloat16()[:1]).dtype is torch.float32
    assert amax(tensor.to(torch.float8_e5m2)[:1]).item() == 3.0
    assert amax(tensor.double()).dtype is torch.float64
    assert amax(torch.tensor(-2.0)).item() == 2.0
    with pytest.raises(PrecisionError, match="floating-point"):
        amax(torch.tensor([1]))


def test_the_scale_of_an_amax_of_eight_is_fifty_six_and_a_margin_halves_it():
    # The history of a step is the largest of its microbatches, not the last one, not the mean.
    history = torch.stack([torch.tensor(value) for value in (8.0, 2.0, 1.0)]).max()
    assert scale_from_amax(history, E4M3).item() == 56.0
    assert scale_from_amax(history, E4M3, 3).item() == 7.0
    assert scale_from_amax(history, E4M3, power_of_two=True).item() == 32.0
    assert scale_from_amax(history, E4M3, 1, power_of_two=True).item() == 16.0
    assert scale_from_amax(torch.tensor(448.0), E4M3, power_of_two=True).item() == 1.0
    assert scale_from_amax(torch.tensor(448.5), E4M3, power_of_two=True).item() == 0.5


@pytest.mark.parametrize("format", ELEMENTS, ids=by_name)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_finite_amax_has_a_normal_positive_scale_with_a_normal_reciprocal(
    format, power_of_two, dtype
):
    limits = torch.finfo(dtype)
    steps = torch.tensor(
        [0.0, 1e-45, 1e-40, limits.tiny, 1e-36, 1.0, 3.0, 1e30, limits.max], dtype=dtype
    )
    found = scale_from_amax(steps, format, 9, power_of_two=power_of_two)
    ends = found.new_tensor([limits.tiny, limits.max])

    assert found.dtype is dtype
    assert ((found >= ends[0]) & (1 / found >= ends[0])).all()
    assert found[0] == 1.0
    assert (steps * found <= format.max * (1 + limits.eps)).all()
    if power_of_two:
        assert (torch.frexp(found).mantissa == 0.5).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_what_is_no_largest_magnitude_has_the_scale_nan(power_of_two):
    lost = torch.tensor([math.nan, math.inf, -1.0])
    found = scale_from_amax(lost, E4M3, power_of_two=power_of_two)
    assert found.isnan().all()


@pytest.mark.parametrize("block", [(2, 2), (1, 2), 1])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zero_rows_and_tensors_come_back_as_zeros_with_finite_scales(block, power_of_two):
    for x in (torch.tensor([[0.0, 0.0], [1.0, -2.0]]), torch.zeros(2, 2)):
        for format in ELEMENTS:
            found = quantize_blockwise(x, block, format, power_of_two=power_of_two)
            assert ((found.scales > 0) & found.scales.isfinite()).all()
            torch.testing.assert_close(found.dequantize(), x, rtol=2e-7, atol=0)


@pytest.mark.parametrize("rule", RULES, ids=by_name)
@pytest.mark.parametrize("format", ELEMENTS, ids=by_name)
def test_a_zero_block_of_mx_has_the_smallest_scale(rule, format):
    x = torch.zeros(3, 64)
    x[1, 40] = 2.0
    found = quantize_mx(x, format, rule)
    assert found.scales[0].tolist() == [0, 0]
    assert torch.equal(found.dequantize(), x)
    assert (found.scale_values() > 0).all()


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_tiny_amax_gives_no_infinite_scale(power_of_two):
    x = torch.tensor([[1e-40, 0.0]])
    for format in ELEMENTS:
        scaled = quantize_blockwise(x, 2, format, power_of_two=power_of_two)
        for found in (scaled, quantize_mx(x, format, ceil_exponent)):
            back = found.dequantize()
            assert found.scale_values().isfinite().all()
            assert back[0, 1] == 0
            assert 0 <= back[0, 0] <= 2e-40


@pytest.mark.parametrize("record", MX_SCALES, ids=lambda record: record["id"])
def test_published_exponents_of_mx_scales_are_reproduced(record):
    outputs = record["outputs"]
    largest = torch.tensor([record["inputs"]["amax"]])
    assert floor_exponent(largest, E4M3).item() == outputs["ocp_floor_exponent"]
    assert ceil_exponent(largest, E4M3).item() == outputs["te_ceil_exponent"]

    found = quantize_mx(largest, E4M3, floor_exponent)

    above = record["inputs"]["amax"] > 448 * 2.0 ** outputs["ocp_floor_exponent"]
    assert above == outputs["ocp_saturates"]
    assert (found.codes.item() == E4M3.max_code) >= above
    assert found.scales.item() == outputs["ocp_floor_exponent"] + 127


def test_published_sizes_and_defaults_of_scaling_are_ours():
    mx = PUBLISHED["fmt.MX"]["outputs"]
    x = torch.ones(4, 64)
    for name, format in (("mxfp8", E4M3), ("mxfp8", E5M2), ("mxfp6", E3M2), ("mxfp4", E2M1)):
        found = quantize_mx(x, format, floor_exponent)
        assert found.block == (1, mx["block_size"])
        assert found.bits_per_element == mx[f"bits_per_element_{name}"]
        assert (found.scale_format.name, E8M0.bits) == (mx["scale"], mx["scale_bits"])
    for name, emax in mx["emax_by_element"].items():
        matching = [format for format in ELEMENTS if format.name == name]
        assert all(format.emax == emax for format in matching)
        assert matching or name == "INT8"
    delayed = PUBLISHED["default.te.DelayedScaling"]["outputs"]
    assert delayed["scale"] == "(FP8_MAX/amax)/2^margin"
    assert (448 / 8) / 2 ** delayed["margin"] == scale_from_amax(torch.tensor(8.0), E4M3)
    assert not PUBLISHED["default.te.Float8CurrentScaling"]["outputs"]["use_power_2_scales"]
    assert PUBLISHED["default.te.MXFP8BlockScaling"]["outputs"]["block"] == found.block[1]
    largest = PUBLISHED["default.te.format_max"]["outputs"]
    assert [largest[format.name] for format in (E4M3, E5M2, E2M1)] == [
        format.max for format in (E4M3, E5M2, E2M1)
    ]


def plain(x, block, format, power_of_two):
    """Return codes and scales of a matrix by whole-tensor expressions."""
    rows, cols = (math.ceil(size / step) for size, step in zip(x.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], cols * block[1])
    padded[: x.shape[0], : x.shape[1]] = x
    largest = padded.view(rows, block[0], cols, block[1]).abs().amax((1, 3))
    scale = scale_from_amax(largest, format, power_of_two=power_of_two)
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return format.encode_clamped(x.float() * spread[: x.shape[0], : x.shape[1]]), 1 / scale


@settings(max_examples=15)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 300),
    block=st.sampled_from([(1, 128), (128, 128), (1, 32), (3, 7), (16, 1)]),
    format=st.sampled_from(ELEMENTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    power_of_two=st.booleans(),
    seed=st.integers(0, 99),
)
def test_blocks_are_encoded_as_block_for_block(
    rows, cols, block, format, dtype, power_of_two, seed
):
    x = drawn((rows, cols), seed, dtype)
    codes, scales = plain(x, block, format, power_of_two)

    found = quantize_blockwise(x, block, format, power_of_two=power_of_two)

    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales, scales)
    transposed = quantize_blockwise(
        x.t().contiguous().t(), block, format, power_of_two=power_of_two
    )
    assert torch.equal(transposed.codes, codes)


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 5000)])
def test_more_than_a_piece_of_the_cache_is_encoded_alike(block, monkeypatch):
    monkeypatch.setattr(pieces, "_CPU_PIECE", 4096)
    x = drawn((150, 700))
    codes, scales = plain(x, block, E4M3, False)

    for tensor in (x, x.view(3, 50, 700)) if block[0] == 1 else (x,):
        found = quantize_blockwise(tensor, block, E4M3)

        assert torch.equal(found.codes.view(150, 700), codes)
        assert torch.equal(found.scales.view(scales.shape), scales)


def test_each_matrix_of_a_batch_has_blocks_of_its_own():
    x = drawn((3, 5, 9))
    whole = quantize_blockwise(x, (4, 4), E5M2)

    parts = [quantize_blockwise(matrix, (4, 4), E5M2) for matrix in x]

    assert whole.scales.shape == (3, 2, 3)
    assert torch.equal(whole.codes, torch.stack([part.codes for part in parts]))
    assert torch.equal(whole.dequantize(), torch.stack([part.dequantize() for part in parts]))


@settings(max_examples=10)
@given(
    shape=st.lists(st.integers(0, 70), min_size=1, max_size=3),
    format=st.sampled_from(ELEMENTS),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_mx_values_are_off_by_at_most_a_rounding_or_what_the_floor_rule_cuts(
    shape, format, rule, dtype, seed
):
    x = drawn(tuple(shape), seed, dtype)

    found = quantize_mx(x, format, rule)

    assert found.codes.shape == x.shape
    assert found.scales.shape == (*x.shape[:-1], math.ceil(x.shape[-1] / 32))
    spread = found.scale_values().double().repeat_interleave(32, -1)[..., : x.shape[-1]]
    exact = x.double() / spread
    expected = format.decode(format.encode_clamped(exact), dtype=torch.float64) * spread
    assert torch.equal(found.dequantize(torch.float64), expected)
    limit = format.max if rule is ceil_exponent else 2.0 ** (format.emax + 1)
    assert (exact.abs() <= limit).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", ELEMENTS, ids=by_name)
def test_only_the_block_with_a_value_that_is_not_finite_comes_back_as_nan(format, bad):
    x = torch.ones(2, 64)
    x[1, 5] = bad
    for found in (
        quantize_blockwise(x, 32, format),
        quantize_mx(x, format, floor_exponent),
        quantize_mx(x, format, ceil_exponent, rounding=Stochastic(Key(0, "x"))),
    ):
        lost = found.dequantize().isnan()
        assert lost[1, :32].all()
        assert lost.sum() == 32
        assert found.scale_values().isnan().sum() == 1


def test_a_magnitude_beyond_the_largest_scale_is_not_cut_in_silence():
    x = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert quantize_mx(x, E4M3, ceil_exponent).dequantize().isnan().all()
    scaled = quantize_blockwise(x, 2, E4M3)
    assert scaled.scales.dtype is torch.float64
    torch.testing.assert_close(
        scaled.dequantize(torch.float64), torch.tensor([1e300, 0.0], dtype=torch.float64)
    )


def test_the_largest_float32_numbers_stay_finite():
    x = torch.full((32,), torch.finfo(torch.float32).max)
    for format in ELEMENTS:
        for rule in RULES:
            assert quantize_mx(x, format, rule).dequantize().isfinite().all()
        assert quantize_blockwise(x, 32, format).dequantize().isfinite().all()
        half = quantize_blockwise(torch.full((4,), 65504.0).half(), 4, format)
        assert half.dequantize(torch.float16).isfinite().all()


@pytest.mark.parametrize("format", ELEMENTS, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_given_scale_is_multiplied_in_the_wider_dtype_and_what_it_leaves_too_large_is_cut(
    format, dtype, by_row, monkeypatch
):
    monkeypatch.setattr(pieces, "_CPU_PIECE", 100)
    x = drawn((3, 7, 33), dtype=dtype)
    largest = amax(x, -1, keepdim=True) if by_row else amax(x)
    scale = 3 * scale_from_amax(largest, format)
    product = x.to(scale.dtype) * scale

    for rounding in (None, toward_zero, Stochastic(Key(0, "x"))):
        how = {} if rounding is None else {"rounding": rounding}
        found = encode_scaled(x, scale, format, **how)

        exact = x.double() * scale.double() if isinstance(rounding, Stochastic) else product
        assert torch.equal(found, format.encode_clamped(exact, **how))
        assert (found & (1 << (format.bits - 1)) - 1 == format.max_code).any()
    assert encode_scaled(x[:, :0], scale.new_ones(1), format).shape == (3, 0, 33)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (2, 0, 4), (0,)])
@pytest.mark.parametrize("rounding", [nearest_even, Stochastic(Key(3, "x", 1))])
def test_scaled_codes_of_nothing_are_nothing(shape, rounding):
    nothing = torch.empty(shape)

    for scale in (torch.ones(()), torch.ones(*shape[:-1], 1)):
        codes = encode_scaled(nothing, scale, E4M3, rounding=rounding)
        assert codes.shape == shape
        assert codes.dtype is torch.uint8
    with pytest.raises(PrecisionError, match="one for each row"):
        encode_scaled(nothing, torch.ones(7), E4M3)


@pytest.mark.parametrize("format", ELEMENTS, ids=by_name)
def test_other_roundings_of_blocks_are_those_of_their_scaled_values(format):
    x = drawn((5, 70))
    nearest = quantize_mx(x, format, floor_exponent)
    spread = nearest.scale_values().repeat_interleave(32, -1)[:, :70].double()
    for rounding in (toward_zero, Stochastic(Key(3, "x", 1))):
        found = quantize_mx(x, format, floor_exponent, rounding=rounding)
        expected = format.encode_clamped(x.double() / spread, rounding=rounding)
        assert torch.equal(found.codes, expected)
        assert torch.equal(found.scales, nearest.scales)


def test_stochastic_blocks_keep_the_mean():
    x = torch.full((40, 1000), 0.3)
    x[:, ::32] = 6.0
    found = quantize_mx(x, E2M1, ceil_exponent, rounding=Stochastic(Key(0, "x")))
    mean = found.dequantize()[x == x[0, 1]].double().mean()
    # Numbers 0 and 0.5 with probability 0.6: a deviation of 0.25 over 38,720 draws.
    assert float(mean) == pytest.approx(float(x[0, 1]), abs=4 * 0.25 / math.sqrt(38_000))


@pytest.mark.parametrize("block", [16, (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nvfp4_scales_blocks_by_the_published_expressions(block, dtype):
    published = PUBLISHED["fmt.NVFP4"]["outputs"]
    assert published["block_decode_scale"] == "cast_e4m3(block_amax/6 * S_enc)"
    assert published["global_scale"] == "fp32; encode scale S_enc = 448*6/amax_tensor"
    x = drawn((32, 48), dtype=dtype)
    blocks = x.view(2, 16, 3, 16) if block != 16 else x.view(32, 1, 3, 16)
    s_enc = 448 * 6 / amax(x)
    decode_scale = E4M3.encode(amax(blocks, (1, 3)) / 6 * s_enc).clamp(min=1)
    spread = E4M3.decode(decode_scale)[:, None, :, None]
    codes = E2M1.encode(blocks.to(s_enc.dtype) * (s_enc / spread))

    found = quantize_nvfp4(x, block)

    assert torch.equal(found.scales, decode_scale)
    assert torch.equal(found.codes, codes.view(x.shape))
    assert found.tensor_scale == 1 / s_enc
    assert (found.format, found.scale_format.name) == (E2M1, published["block_scale"])
    if block == published["block_size"]:
        assert found.bits_per_element == published["bits_per_element"]
    assert found.scale_values().shape == decode_scale.shape
    # A quarter of the largest is the worst that E2M1 rounds, and a sixteenth its scale.
    apart = (found.dequantize(torch.float64) - x.double()).abs().view(blocks.shape)
    assert (apart <= 0.25 * amax(blocks, (1, 3), keepdim=True) + float(amax(x)) * 2.0**-18).all()


def test_nvfp4_keeps_zero_tiny_huge_and_lost_blocks_apart():
    largest = torch.finfo(torch.float32).max
    for size in (0.0, 1e-45, 1e-40, 1e-30, largest):
        x = torch.zeros(2, 32)
        x[0, 3] = size
        back = quantize_nvfp4(x).dequantize()
        assert (back[x == 0] == 0).all()
        assert back.isfinite().all()
        if size >= 1e-30:
            torch.testing.assert_close(back, x, rtol=1e-6, atol=0)
    x = torch.ones(2, 32)
    x[0, 3] = math.nan
    assert quantize_nvfp4(x).dequantize().isnan().all()
    found = quantize_nvfp4(x, largest=torch.tensor(1.0))
    assert found.dequantize().isnan().sum() == 16
    assert quantize_nvfp4(torch.empty(0, 4)).dequantize().shape == (0, 4)


def test_nvfp4_shards_that_know_the_largest_magnitude_are_the_whole_tensors():
    x = drawn((8, 64))
    draw = Key(0, "gradient")
    whole = quantize_nvfp4(x, rounding=Stochastic(draw))

    for rank in range(2):
        box = Box((0, 32 * rank), (8, 32 * rank + 32))
        rounding = Stochastic(draw, (8, 64), box)
        part = quantize_nvfp4(x[box.slices], largest=amax(x), rounding=rounding)
        assert torch.equal(part.dequantize(), whole.dequantize()[box.slices])


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: quantize_blockwise(torch.ones(4), 0, E4M3), "at least 1"),
        (lambda: quantize_blockwise(torch.ones(4), (1, 2, 3), E4M3), "rows, columns"),
        (lambda: quantize_blockwise(torch.ones(4), (1.0, 2), E4M3), "rows, columns"),
        (lambda: quantize_blockwise(torch.tensor(1.0), 2, E4M3), "at least one dim"),
        (lambda: quantize_blockwise(torch.tensor([1]), 2, E4M3), "floating-point"),
        (lambda: quantize_blockwise(torch.ones(4), 2, BF16), "at most 8 bits, got BF16"),
        (lambda: quantize_mx(torch.ones(4), E8M0, ceil_exponent), "signed"),
        (lambda: encode_scaled(torch.ones(4, 2), torch.ones(2), E4M3), "one for each row"),
        (lambda: encode_scaled(torch.ones(4), torch.ones(()), BF16), "at most 8 bits"),
        (lambda: quantize_nvfp4(torch.ones(4), largest=torch.ones(2)), "by MAX"),
        (lambda: scale_from_amax(torch.ones(4).half(), E4M3), "float32 or float64"),
        (lambda: scale_from_amax(torch.ones(4), E4M3, 0.5), "integer"),
        (lambda: scale_from_amax(torch.ones(4), E4M3, -1), "0 to 64"),
    ],
)
def test_what_cannot_be_quantised_is_refused(mistake, says):
    with pytest.raises(PrecisionError, match=says):
        mistake()
