"""A dtype policy says which tensor has which dtype."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.precision import PRESETS, DtypePolicy, NotAvailableError, PrecisionError, policy

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def wideness(dtype):
    return torch.finfo(dtype).bits


@pytest.mark.parametrize(
    ("name", "narrow", "wide"),
    [
        ("float32", torch.float32, torch.float32),
        ("float64", torch.float64, torch.float64),
        ("bfloat16", torch.bfloat16, torch.float32),
        ("float16", torch.float16, torch.float32),
    ],
)
def test_a_preset_computes_in_its_format_and_reduces_in_at_least_float32(name, narrow, wide):
    assert policy(name) == DtypePolicy(narrow, narrow, wide, wide)


def test_every_preset_is_listed():
    assert set(PRESETS) == {"float32", "float64", "bfloat16", "float16"}


@pytest.mark.parametrize("name", PRESETS)
@given(dtype=st.sampled_from(DTYPES))
def test_a_kept_parameter_is_only_ever_raised(name, dtype):
    rules = policy(name, keep_fp32=["*norm*"])
    parameter = torch.zeros(2, dtype=dtype)

    kept = rules.parameter_dtype("layers.0.norm.weight", parameter)

    assert wideness(kept) >= max(32, wideness(dtype))
    assert rules.compute_dtype("layers.0.norm.weight", parameter) == kept
    assert rules.parameter_dtype("layers.0.up.weight", parameter) == rules.parameter


def test_a_float64_model_that_is_kept_stays_float64():
    rules = policy("float16", keep_fp32=["*"])

    assert rules.parameter_dtype("w", torch.zeros(1, dtype=torch.float64)) == torch.float64


def test_integer_parameters_keep_their_dtype():
    codes = torch.zeros(2, dtype=torch.int8)

    assert policy("bfloat16").parameter_dtype("codes", codes) == torch.int8
    assert policy("bfloat16").compute_dtype("codes", codes) == torch.int8


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*norm*", "layers.3.attention_norm.weight", True),
        ("layers.?.norm.weight", "layers.3.norm.weight", True),
        ("norm", "layers.3.norm.weight", False),
        ("*Norm*", "layers.3.norm.weight", False),
        (re.compile(r".*\.norm\d\..*"), "layers.3.norm2.weight", True),
        (re.compile(r"norm"), "layers.3.norm.weight", False),
    ],
)
def test_patterns_match_whole_names(pattern, name, matches):
    assert policy("bfloat16", keep_fp32=[pattern]).keeps(name) == matches


@pytest.mark.parametrize("pattern", ["*layernorm*", re.compile("layernorm")])
def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(pattern):
    model = nn.ModuleDict({"layer_norm": nn.LayerNorm(2), "up": nn.Linear(2, 2)})

    with pytest.raises(PrecisionError, match=r"layernorm.*none of 4.*layer_norm\.(weight|bias)"):
        policy("bfloat16", keep_fp32=["up.*", pattern]).apply(model)

    assert model["up"].weight.dtype == torch.float32


def test_one_pattern_for_a_sequence_of_patterns_is_refused():
    with pytest.raises(PrecisionError, match=r"sequence of patterns"):
        policy("bfloat16", keep_fp32="*norm*")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("bfloat61", PrecisionError, "did you mean 'bfloat16'"),
        ("fp16", PrecisionError, "'fp16' is spelled 'float16'"),
        ("bf16", PrecisionError, "'bf16' is spelled 'bfloat16'"),
        ("fp32", PrecisionError, "'fp32' is spelled 'float32'"),
        ("fp8-delayed", NotAvailableError, "not available yet"),
    ],
)
def test_an_unknown_preset_is_refused(name, error, message):
    with pytest.raises(error, match=message):
        policy(name)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [
        (torch.int32, PrecisionError),
        ("float32", PrecisionError),
        (torch.float8_e4m3fn, NotAvailableError),
    ],
)
def test_a_dtype_that_is_no_format_of_ours_is_refused(dtype, error):
    with pytest.raises(error, match="reduce must be one of"):
        DtypePolicy(torch.float32, torch.float32, dtype, torch.float32)
