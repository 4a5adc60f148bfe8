"""Floating-point operations by every convention, held to what others have printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import nn

from trainwright.checkpointing.activations import compose, parse_policy
from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration.data import Reader, Shuffled
from trainwright.integration.data.packing import WholeDocuments
from trainwright.integration.devices import DEVICES, PEAK_OF_DTYPE, device_of, find_device
from trainwright.integration.errors import ConfigError
from trainwright.integration.feed import Feed
from trainwright.integration.flops import (
    FULL_SQUARE,
    MODEL,
    PALM,
    SC21,
    SIX_N,
    Convention,
    Products,
    Scores,
    Spans,
    flops_per_token,
    utilization,
)
from trainwright.integration.model import PRESETS, ModelShape, PlainLayers, build_stage
from trainwright.integration.model.shape import Norm
from trainwright.integration.sequence_part import SequencePart
from trainwright.precision import PRESETS as DTYPES
from trainwright.sharding import Mesh, MeshShape
from trainwright.sharding.context import ContextLayout

PUBLISHED = json.loads((Path(__file__).parent / "published_flops.json").read_text())


def rows(group: str) -> list[Any]:
    return [pytest.param(row[1:], id=row[0]) for row in PUBLISHED[group]["rows"]]


def overlap(least: float, most: float, printed: float, half: float) -> bool:
    """Whether what the printed inputs allow meets what the printed result stands for."""
    return least <= printed + half and most >= printed - half


def gpt(layers: int, hidden: int, vocabulary: int, positions: int = 0) -> Products:
    """A GPT with biases and learned positions, whose head is its embedding."""
    vectors = layers * 13 * hidden + 2 * hidden + positions * hidden
    return Products(
        attention=4 * layers * hidden**2,
        feed_forward=8 * layers * hidden**2,
        scores=(Scores(layers, 2 * hidden),),
        head=vocabulary * hidden,
        vectors=vectors,
    )


def qwen3_235b() -> Products:
    layers, hidden, heads, keys, head = 94, 4096, 64, 4, 128
    return Products(
        attention=layers * 2 * hidden * head * (heads + keys),
        feed_forward=layers * 8 * 3 * hidden * 1536,
        scores=(Scores(layers, 2 * heads * head),),
        head=151936 * hidden,
        router=layers * 128 * hidden,
    )


def qwen3_8b() -> Products:
    return Products(
        attention=36 * 2 * 4096 * 128 * (32 + 8),
        feed_forward=36 * 3 * 4096 * 12288,
        scores=(Scores(36, 2 * 32 * 128),),
        head=151936 * 4096,
    )


def deepseek_v3(extra: int = 0) -> Products:
    """With latent attention, and ``extra`` layers that predict a token further ahead."""
    hidden, layers = 7168, 61 + extra
    queries = hidden * 1536 + 1536 * 128 * 192
    keys_and_values = hidden * (512 + 64) + 512 * 128 * (128 + 128)
    sparse = 9 * 3 * hidden * 2048
    return Products(
        attention=layers * (queries + keys_and_values + 128 * 128 * hidden),
        feed_forward=3 * 3 * hidden * 18432 + (58 + extra) * sparse + extra * 2 * hidden**2,
        scores=(Scores(layers, 128 * (192 + 128)),),
        head=(1 + extra) * 129280 * hidden,
        router=(58 + extra) * 256 * hidden,
    )


def llama(layers: int, width: int, heads: int, mlp_width: int) -> Products:
    shape = ModelShape(128256, width, layers, heads, kv_heads=8, mlp_width=mlp_width)
    return Products.of(shape)


MODELS = {
    "llama3-8b": llama(32, 4096, 32, 14336),
    "llama3-70b": llama(80, 8192, 64, 28672),
    "llama3-405b": llama(126, 16384, 128, 53248),
    "qwen3-8b": qwen3_8b(),
    "qwen3-235b": qwen3_235b(),
    "deepseek-v3": deepseek_v3(),
    "deepseek-v3-mtp": deepseek_v3(extra=1),
}


@pytest.mark.parametrize("row", rows("equation_3"))
def test_seconds_a_step_give_the_teraflops_that_were_printed_with_equation_3(
    row: list[float],
) -> None:
    layers, hidden, vocabulary, length, sequences, devices, seconds, unsure, printed, half = row
    products = gpt(int(layers), int(hidden), int(vocabulary))
    tera = flops_per_token(products, int(length), SC21) * sequences * length / devices / 1e12
    assert overlap(tera / (seconds + unsure), tera / (seconds - unsure), printed, half)


@pytest.mark.parametrize("row", rows("table_1"))
def test_parameters_and_shares_of_the_peak_are_those_of_megatrons_table_1(row: list[float]) -> None:
    (
        layers,
        hidden,
        devices,
        billions,
        unsure,
        tera,
        half,
        percent,
        half_percent,
        peta,
        half_peta,
    ) = row
    found = gpt(int(layers), int(hidden), 51200, positions=2048).active_parameters / 1e9
    assert overlap(found, found, billions, unsure)
    a100 = find_device("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    peak = a100.peak("float16")
    assert peak is not None
    shares = [100 * utilization((tera + side) * 1e12, 1.0, peak) for side in (-half, half)]
    assert overlap(*shares, percent, half_percent)
    total = [devices * (tera + side) / 1e3 for side in (-half, half)]
    assert overlap(*total, peta, half_peta)


@pytest.mark.parametrize("row", rows("palm"))
def test_tokens_a_second_give_the_mfu_and_hfu_that_were_printed_with_six_n(row: list[Any]) -> None:
    layers, hidden, vocabulary, length, parameters, devices, peak, recomputed, *rest = row
    tokens, unsure, mfu, half_mfu, hfu, half_hfu = rest
    products = gpt(layers, hidden, vocabulary, positions=length)
    assert products.active_parameters == parameters
    again = "everything" if recomputed else "none"
    for convention, printed, half in (
        (PALM, mfu, half_mfu),
        (attrs.evolve(PALM, recomputed=again), hfu, half_hfu),
    ):
        each = flops_per_token(products, length, convention)
        found = [
            100 * utilization(each * (tokens + side), 1.0, devices * peak * 1e12)
            for side in (-unsure, unsure)
        ]
        assert overlap(*found, printed, half)


@pytest.mark.parametrize("row", rows("megatron_core"))
def test_tokens_a_second_give_the_model_teraflops_that_megatron_core_printed(
    row: list[Any],
) -> None:
    model, length, tokens, unsure, printed, half = row
    tera = flops_per_token(MODELS[model], length) / 1e12
    # The two columns are means over steps of their own; the cards print six digits of each.
    slack = 1e-4 * printed
    found = (tera * (tokens - unsure), tera * (tokens + unsure))
    assert overlap(*found, printed, half + slack)


def test_equation_3_is_what_the_paper_writes() -> None:
    layers, hidden, vocabulary, length = 7, 48, 1000, 96
    products = gpt(layers, hidden, vocabulary)
    rest = length / (6 * hidden) + vocabulary / (16 * layers * hidden)
    assert flops_per_token(products, length, SC21) == pytest.approx(
        96 * layers * hidden**2 * (1 + rest), rel=1e-12
    )
    rest = length / (6 * hidden) + vocabulary / (12 * layers * hidden)
    assert flops_per_token(products, length, FULL_SQUARE) == pytest.approx(
        72 * layers * hidden**2 * (1 + rest), rel=1e-12
    )


@pytest.mark.parametrize("name", PRESETS)
def test_six_n_counts_the_parameters_that_a_token_meets(name: str) -> None:
    shape = PRESETS[name]
    products = Products.of(shape)
    idle = 0
    if shape.experts is not None:
        routing = shape.experts.routing
        others = routing.num_experts - routing.top_k
        idle = shape.layers * others * 3 * shape.width * shape.experts.width
    assert products.active_parameters == shape.num_parameters - idle
    assert flops_per_token(products, 999, SIX_N) == 6 * products.active_parameters


@pytest.mark.parametrize("gated", [True, False])
def test_a_decoder_is_made_of_the_products_that_are_counted(gated: bool) -> None:
    norm: Norm = "rms" if gated else "layer"
    shape = ModelShape(64, 32, 2, 4, kv_heads=2, mlp_width=48, gated=gated, norm=norm, window=9)
    model = build_stage(shape, PlainLayers(), range(2), compose(parse_policy("none")))
    weights = [each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear)]
    counted = attrs.evolve(MODEL, scores=False)
    assert flops_per_token(Products.of(shape), 8, counted) == 6 * sum(weights)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert Products.of(shape).active_parameters == total
    assert Products.of(shape).scores == (Scores(2, 2 * 32, window=9),)


def test_a_gpt_2_has_as_many_parameters_as_its_vectors_and_products_together() -> None:
    shape = ModelShape(
        vocabulary=50257, width=768, layers=12, heads=12, kv_heads=12, mlp_width=3072, tied=True,
        norm="layer", positions="learned", max_positions=1024, activation="gelu_tanh", gated=False,
        qkv_bias=True, output_bias=True, mlp_bias=True,
    )  # fmt: skip
    products = Products.of(shape)
    assert products.active_parameters == 124_439_808
    assert products == attrs.evolve(gpt(12, 768, 50257, positions=1024), router=0)


def test_a_causal_mask_leaves_half_of_the_square_and_a_window_less() -> None:
    length, window = 64, 16
    seen = [min(place, window) for place in range(length)]
    whole = Scores(1, width=1).forward(length, causal=False)
    assert whole == 2 * length
    assert Scores(1, width=1).forward(length, causal=True) == length
    narrow = Scores(1, width=1, window=window)
    assert narrow.forward(length, causal=False) == 2 * window
    # The mean over the places counts half of a key more: the diagonal.
    assert narrow.forward(length, causal=True) == pytest.approx(
        2 * (sum(seen) + window / 2) / length
    )
    assert Scores(1, 1, window=2 * length).forward(length, causal=True) == length


def test_each_switch_changes_its_own_term() -> None:
    products = Products(
        attention=1, feed_forward=10, scores=(Scores(1, 5),), head=100, table=1000, router=2
    )
    nothing = Convention(scores=False, head=False)
    assert flops_per_token(products, 10, nothing) == 6 * 11
    for change, extra in (
        ({"scores": True}, 3 * 50.0),
        ({"scores": True, "causal": False}, 3 * 100.0),
        ({"head": True}, 6 * 100.0),
        ({"table": True}, 6 * 1000.0),
        ({"router": True}, 6 * 2.0),
        ({"recomputed": "layers", "head": True}, 6 * 100.0 + 2 * 11),
        ({"recomputed": "everything", "head": True}, 6 * 100.0 + 2 * 111),
        ({"recomputed": "attention", "scores": True}, 4 * 50.0),
    ):
        changed = attrs.evolve(nothing, **change)
        assert flops_per_token(products, 10, changed) == 66 + extra, change
    with pytest.raises(ConfigError, match="recomputed must be one of none, attention"):
        Convention(recomputed="full")


def test_devices_are_found_by_the_names_that_pytorch_gives_them() -> None:
    for name, found, peak in (
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA H200", "H200 SXM", 989e12),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", 312e12),
        ("A100-SXM-80GB", "A100 SXM 80 GB", 312e12),
        ("NVIDIA GB200", "GB200", 2500e12),
        ("AMD Instinct MI300X", "MI300X", 1300e12),
    ):
        device = find_device(name)
        assert device is not None
        assert device.name == found
        assert device.peak("bfloat16") == peak
        assert device.peak("float64") is None
    # One that is like another by name alone is better unknown than wrong.
    assert find_device("NVIDIA H100 NVL") is None
    assert find_device("NVIDIA GeForce RTX 4090") is None
    v100 = find_device("Tesla V100-SXM2-32GB")
    assert v100 is not None
    assert v100.peak("bfloat16") is None
    assert v100.peak("fp8-mx") is None
    assert device_of(torch.device("cpu")) is None


def test_peaks_are_of_dense_products_and_every_dtype_says_which() -> None:
    assert set(DTYPES) == {*PEAK_OF_DTYPE, "float64"}
    for device in DEVICES:
        assert device.fp32 < device.fp16
        if device.fp8 is not None:
            assert device.fp8 == pytest.approx(2 * device.fp16, rel=0.02)


def test_documents_that_do_not_see_each_other_have_the_flops_of_each_alone() -> None:
    products = Products(attention=7, feed_forward=30, scores=(Scores(2, 5),), head=100)
    lengths = (4, 1, 3)
    # By hand: 6 FLOPs a weight and token; of scores 2 * 2 * 5 a key, half of the square, thrice.
    by_hand = 6 * 137 * (4 + 1 + 3) + 3 * 20 * (16 + 1 + 9) / 2

    found = Spans(sum(lengths), sum(length**2 for length in lengths)).flops(products)

    assert found == pytest.approx(by_hand, rel=1e-12)
    alone = [length * flops_per_token(products, length) for length in lengths]
    assert found == pytest.approx(sum(alone), rel=1e-12)
    assert Spans(16 * 128, 16 * 128**2).flops(products) == 16 * 128 * flops_per_token(products, 128)
    assert Spans(0, 0).flops(products) == 0.0


@pytest.mark.parametrize("layout", ["dp=1", "cp=2", "dp=2", "dp=2,cp=2"])
def test_a_batch_says_the_documents_that_attend_in_it_and_no_padding(layout: str) -> None:
    # Of rows of five inputs one has four of a document and one of another, one has three.
    documents = WholeDocuments(np.arange(9, dtype=np.uint8), np.array([4, 6, 9]), 5)
    shape = MeshShape.parse(layout)

    def work(world: Communicator) -> list[Spans]:
        mesh = Mesh(world, shape)
        reader = Reader(
            Shuffled(documents, seed=3), 2, data_rank=mesh.coordinate("dp"), data_size=shape.dp
        )
        part = SequencePart(ContextLayout("zigzag", 5, shape.cp), mesh.communicator("cp"))
        feed = Feed(reader, mesh.communicator("dp", "cp"), part)
        return [feed.next_batch().spans() for _ in range(2)]

    for found in LocalWorld(shape.world_size, timeout_s=60.0).run(work):
        assert found == [Spans(4 + 1 + 3, 16 + 1 + 9)] * 2


def test_model_flops_leave_recomputation_out() -> None:
    products = gpt(2, 16, 32)
    assert flops_per_token(products, 8, MODEL) < flops_per_token(
        products, 8, attrs.evolve(MODEL, recomputed="layers")
    )
