"""Formats hold the numbers that standards and published tables give them."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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
    NumberFormat,
    Specials,
    decoding,
)

PUBLISHED = {
    record["id"]: record
    for record in json.loads((Path(__file__).parent / "published_formats.json").read_text())
}
CODED = {
    "code.float8_e4m3fn": E4M3,
    "code.float8_e5m2": E5M2,
    "code.float8_e4m3fnuz": E4M3FNUZ,
    "code.float6_e2m3fn": E2M3,
    "code.float4_e2m1fn": E2M1,
    "code.float8_e8m0fnu": E8M0,
}
CONSTANT = {
    "fmt.E4M3": E4M3,
    "fmt.E5M2": E5M2,
    "fmt.E4M3FNUZ": E4M3FNUZ,
    "fmt.E5M2FNUZ": E5M2FNUZ,
    "fmt.E2M1": E2M1,
    "fmt.E2M3": E2M3,
    "fmt.E3M2": E3M2,
    "fmt.E8M0": E8M0,
    "fmt.bf16": BF16,
    "fmt.fp16": FP16,
    "fmt.fp32": FP32,
}


@pytest.mark.parametrize(
    ("format", "bits", "exponent", "mantissa", "largest", "normal", "subnormal"),
    [
        (FP32, 32, 8, 23, 3.4028235e38, 1.1754944e-38, 1.4e-45),
        (FP16, 16, 5, 10, 65504, 6.1035e-5, 5.96e-8),
        (BF16, 16, 8, 7, 3.3895e38, 1.1755e-38, 9.18e-41),
        (E4M3, 8, 4, 3, 448, 2**-6, 2**-9),
        (E5M2, 8, 5, 2, 57344, 2**-14, 2**-16),
        (E8M0, 8, 8, 0, 2.0**127, 2.0**-127, None),
        (E2M1, 4, 2, 1, 6, 1, 0.5),
        (E2M3, 6, 2, 3, 7.5, 1, 0.125),
        (E3M2, 6, 3, 2, 28, 0.25, 0.0625),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_format_has_the_printed_sizes_and_limits(
    format, bits, exponent, mantissa, largest, normal, subnormal
):
    found = (format.bits, format.exponent_bits, format.mantissa_bits)
    assert found == (bits, exponent, mantissa)
    assert format.max == pytest.approx(largest, rel=2e-5)
    assert format.min_normal == pytest.approx(normal, rel=2e-5)
    # The least digits of 1.4e-45 and 5.96e-8 are printed.
    assert format.min_subnormal == (subnormal and pytest.approx(subnormal, rel=2e-3))


@pytest.mark.parametrize("name", CODED)
def test_every_code_has_its_published_number(name):
    format, outputs = CODED[name], PUBLISHED[name]["outputs"]
    expected = torch.tensor(
        [math.nan if value is None else float(value) for value in outputs["value_by_code"]],
        dtype=torch.float64,
    )
    points = format.code_points()
    torch.testing.assert_close(points, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(points.signbit()[expected == 0], expected.signbit()[expected == 0])
    counts = {
        "finite_codes": int(points.isfinite().sum()),
        "nan_codes": int(points.isnan().sum()),
        "inf_codes": int(points.isinf().sum()),
        "max_finite": format.max,
        "min_normal": format.min_normal,
        "min_subnormal": format.min_subnormal,
        "min_exponent": format.emin,
        "max_exponent": format.emax,
        "nan_code": int(points.isnan().nonzero()[-1]) if format.has_nan else None,
    }
    for key in outputs.keys() - {"value_by_code"}:
        assert counts[key] == outputs[key], key


@pytest.mark.parametrize("name", CONSTANT)
def test_a_format_has_its_published_constants(name):
    format, outputs = CONSTANT[name], dict(PUBLISHED[name]["outputs"])
    points = format.code_points() if format.bits <= 16 else None
    for key, attribute in {
        "max": "max", "max_normal": "max", "emax": "emax", "emin": "emin", "bias": "bias",
        "min_normal": "min_normal", "min_subnormal": "min_subnormal", "eps": "eps",
        "min_exponent": "emin", "max_exponent": "emax",
    }.items():  # fmt: skip
        if key in outputs:
            assert getattr(format, attribute) == outputs.pop(key), key
    if "dynamic_range" in outputs:
        spread = math.log2(format.max / format.min_subnormal)
        assert math.ceil(spread) == outputs.pop("dynamic_range")
    if "max_exact_integer" in outputs:
        largest = int(outputs.pop("max_exact_integer"))
        around = torch.tensor([largest - 1.0, largest, largest + 1.0], dtype=torch.float64)
        kept = format.decode(format.encode(around), dtype=torch.float64) == around
        assert kept.tolist() == [True, True, False]
    if "abs_values" in outputs:
        assert points[:8].tolist() == outputs.pop("abs_values")
    if outputs.pop("infinities", outputs.pop("infinity", None)) == "none":
        assert not format.has_infinity
        assert not points.isinf().any()
    if outputs.pop("zero", None) == "none":
        assert not (points == 0).any()
    for key in outputs.keys() & {"max_normal_code", "nan_code", "inf_code", "nan_codes"}:
        value = {"max": format.max, "inf": math.inf, "nan": math.nan}[key.split("_")[0]]
        codes = codes_like(outputs.pop(key), format.bits)
        expected = torch.full((len(codes),), value, dtype=torch.float64)
        found = format.decode(torch.tensor(codes), dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert not outputs, outputs


def codes_like(text, bits):
    """Return the codes that a table writes like ``S.1111.{01,10}`` or ``0xFF``, sign clear."""
    if text.startswith("0x"):
        return [int(text, 16)]
    head, _, choices = text.partition("{")
    tails = choices.rstrip("}").split(",")
    words = [(head + tail).replace("S", "0").replace(".", "") for tail in tails]
    assert {len(word) for word in words} == {bits}
    return [int(word, 2) for word in words]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_encoding_gives_back_the_code_of_every_number(format):
    codes = torch.arange(1 << min(format.bits, 16)) << max(0, format.bits - 16)
    numbers = format.decode(codes, dtype=torch.float64)

    found = format.encode(numbers)

    finite = ~numbers.isnan()
    assert torch.equal(found.long()[finite], codes[finite])
    assert format.decode(found).isnan().equal(numbers.isnan())
    assert torch.equal(format.encode(numbers.float()), found)


@pytest.mark.parametrize(
    "format", [f for f in FORMATS if f.dtype and f is not E2M1], ids=lambda format: format.name
)
def test_numbers_and_codes_are_those_of_the_dtype(format):
    codes = torch.arange(1 << min(format.bits, 16)) << max(0, format.bits - 16)
    tensor = format.as_torch(codes)

    assert tensor.dtype is format.dtype
    assert torch.equal(format.codes_of(tensor).long(), codes)
    for dtype in (torch.float32, torch.float64):
        found = format.decode(codes, dtype=dtype)
        torch.testing.assert_close(found, tensor.to(dtype), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit() & ~found.isnan(), tensor.to(dtype).signbit() & ~found.isnan())  # fmt: skip  # noqa: E501


def test_two_codes_of_four_bits_go_in_a_byte_the_first_in_its_low_half():
    codes = E2M1.encode(torch.tensor([[0.5, -6.0], [1.0, 3.0]]))

    packed = E2M1.as_torch(codes)

    assert packed.dtype is torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8).tolist() == [[0xF1], [0x52]]
    assert torch.equal(E2M1.codes_of(packed), codes)
    with pytest.raises(PrecisionError, match="pad it"):
        E2M1.as_torch(codes[:, :1])


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_any_shape_is_encoded_and_decoded_also_an_empty_or_strided_one(format):
    values = torch.tensor([[1.0, 2.0, 4.0], [2.0, 1.0, 2.0]])
    for part in (values, values.t(), values[:, ::2], values[0, 0], values[:0], values.expand(2, 2, 3)):  # fmt: skip  # noqa: E501
        codes = format.encode(part)
        assert codes.shape == part.shape
        assert torch.equal(format.decode(codes), part)


def test_many_codes_are_decoded_and_encoded_as_few_are():
    codes = torch.arange(256, dtype=torch.uint8).repeat(600).view(300, 512)
    points = E4M3.code_points(dtype=torch.float32)

    found = E4M3.decode(codes)

    torch.testing.assert_close(found[::50], points.repeat(6, 2), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(E4M3.encode(found), codes)


def test_numbers_are_computed_once_and_a_table_that_was_given_out_is_the_callers(monkeypatch):
    codes = torch.arange(256)
    numbers = E4M3.decode(codes)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "_compute", None)
        E4M3.decode(codes).zero_()
        E4M3.code_points(dtype=torch.float32).zero_()
        with FakeTensorMode():
            with pytest.raises(TypeError):
                E4M3.decode(torch.zeros(3, dtype=torch.uint8))
    with FakeTensorMode():
        assert E4M3.decode(torch.zeros(3, dtype=torch.uint8)).shape == (3,)

    assert torch.allclose(E4M3.decode(codes), numbers, rtol=0, atol=0, equal_nan=True)


def test_a_format_of_ones_own_has_numbers_without_a_dtype():
    e5m6 = NumberFormat("E5M6", 5, 6, 15, Specials.IEEE)
    e4m3 = NumberFormat("E4M3 IEEE", 4, 3, 7, Specials.IEEE)

    points = e5m6.code_points()

    # It is FP16 with four digits fewer.
    half = FP16.code_points()[::16]
    torch.testing.assert_close(points, half, rtol=0, atol=0, equal_nan=True)
    assert (e4m3.max, e4m3.encode(torch.tensor([1e9, 240.0])).tolist()) == (240.0, [120, 119])


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: NumberFormat("E9M1", 9, 1, 255, Specials.IEEE), "1 to 8 exponent"),
        (lambda: NumberFormat("E8M9", 8, 9, 300, Specials.IEEE), "another bias"),
        (lambda: NumberFormat("U", 4, 3, 7, Specials.ALL_ONES, signed=False), "powers of two"),
        (lambda: NumberFormat("E1M0", 1, 0, 0, Specials.IEEE), "no code left"),
        (lambda: FP32.code_points(), "too many for a table"),
        (lambda: E4M3.encode(torch.tensor([1])), "floating-point"),
        (lambda: E4M3.encode(torch.tensor([1j])), "floating-point"),
        (lambda: E4M3.decode(torch.tensor([1.0])), "integers"),
        (lambda: E4M3.decode(torch.tensor([256])), "0 to 255, got 256"),
        (lambda: E4M3.decode(torch.tensor([-1], dtype=torch.int8)), "0 to 255, got -1"),
        (lambda: E2M1.decode(torch.tensor([16], dtype=torch.uint8)), "0 to 15, got 16"),
        (lambda: E4M3.decode(torch.tensor([1]), dtype=torch.float16), "float32 or float64"),
        (lambda: E3M2.as_torch(torch.tensor([1])), "no dtype for E3M2"),
        (lambda: E4M3.codes_of(torch.tensor([1.0])), "float8_e4m3fn"),
    ],
)
def test_what_is_no_format_number_or_code_is_refused(mistake, says):
    with pytest.raises(PrecisionError, match=says):
        mistake()
