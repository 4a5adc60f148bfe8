"""A dtype policy says which tensor has which dtype."""

import re

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.precision import (
    ALIASES,
    PRESETS,
    DtypePolicy,
    NotAvailableError,
    PrecisionError,
    float8,
    policy,
)

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


RECIPES = {
    "fp8-delayed": float8.Delayed(),
    "fp8-current": float8.Current(),
    "fp8-row": float8.PerRow(),
    "fp8-block": float8.Blockwise(),
    "fp8-mx": float8.Mx(),
}


def test_every_preset_is_listed():
    assert set(PRESETS) == {"float32", "float64", "bfloat16", "float16", *RECIPES}


@pytest.mark.parametrize("short", ALIASES)
def test_an_alias_is_its_preset(short):
    assert ALIASES[short] in PRESETS
    assert policy(short, keep_fp32=["*norm*"]) == policy(ALIASES[short], keep_fp32=["*norm*"])


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_of_fp8_is_bfloat16_with_a_recipe(name):
    wanted = attrs.evolve(policy("bf16"), recipe=RECIPES[name])

    assert policy(name) == wanted != policy("bf16")


def feed_forward():
    torch.manual_seed(0)
    ends = nn.Linear(8, 32), nn.Linear(32, 4)
    inner = [nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32)]
    return nn.Sequential(ends[0], *inner, ends[1])


@pytest.mark.parametrize("name", RECIPES)
def test_applying_a_preset_of_fp8_converts_the_linear_layers_that_are_not_kept(name):
    model = feed_forward()
    parameters = dict(model.named_parameters())

    applied = policy(name, keep_fp32=["4.*"]).apply(model)
    out = model(torch.randn(6, 8))
    out.square().sum().backward()
    lost = applied.float8.end_step()

    assert [type(layer) is float8.Float8Linear for layer in model] == [
        *(False, True, False),
        *(True, False, False),
    ]
    assert list(applied.float8.products) == ["1", "3"]
    assert applied.float8.recipe == RECIPES[name]
    assert all(p is parameters[n] and p.grad is not None for n, p in model.named_parameters())
    assert {n for n, p in parameters.items() if p.dtype is torch.float32} == {
        *("2.weight", "2.bias", "4.weight", "4.bias")
    }
    assert out.dtype is torch.float32
    assert lost == ()


def test_a_policy_with_a_recipe_refuses_a_model_that_has_no_layer_for_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    with pytest.raises(PrecisionError, match="nothing is left to replace of 2 linear layers"):
        policy("fp8-current").apply(model)

    assert all(type(layer) is nn.Linear for layer in model)
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_a_policy_without_a_recipe_converts_nothing():
    model = feed_forward()

    assert policy("bf16").apply(model).float8 is None
    assert all(type(layer) in (nn.Linear, nn.LayerNorm) for layer in model)


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
    ("name", "near"),
    [
        ("bfloat61", "bfloat16"),
        ("bf61", "bf16"),
        ("fp8", "fp8-mx"),
        ("fp8-rows", "fp8-row"),
        ("fp8_delayed", "fp8-delayed"),
        (None, ""),
    ],
)
def test_an_unknown_preset_is_refused_with_the_nearest_name(name, near):
    with pytest.raises(PrecisionError, match=f"float32, .*fp8-mx, got {name!r}.*mean '{near}"):
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
