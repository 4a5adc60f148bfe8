"""The table of saved bytes adds up to the closed forms, and is what PyTorch saves."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.checkpointing.activations import (
    LayerShape,
    gpt_layer,
    input_bytes,
    llama_layer,
    measure,
    saved_bytes,
)
from trainwright.checkpointing.errors import PolicyError


@st.composite
def shapes(draw):
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    return LayerShape(
        draw(st.integers(1, 4)),
        16 * draw(st.integers(1, 8)),
        heads * 8 * draw(st.integers(1, 8)),
        heads,
        kv_heads,
        16 * draw(st.integers(1, 64)),
    )


@settings(max_examples=10)
@given(shape=shapes(), t=st.sampled_from([1, 2, 4, 8]))
def test_gpt_rows_add_up_to_the_closed_forms(shape, t):
    s, b, h, a = shape.sequence, shape.batch, shape.hidden, shape.heads
    rows = gpt_layer(LayerShape(b, s, h, a))
    core = 5 * a * s * s * b
    assert saved_bytes(rows) == 34 * s * b * h + core
    assert saved_bytes(rows, tp=t) == 10 * s * b * h + (24 * s * b * h + core) // t
    assert saved_bytes(rows, tp=t, sp=True) == (34 * s * b * h + core) // t
    assert saved_bytes(rows, tp=t, recompute=["core"]) == (10 + 24 / t) * s * b * h
    assert saved_bytes(rows, tp=t, sp=True, recompute=["core"]) == 34 * s * b * h / t
    assert input_bytes(LayerShape(b, s, h, a), tp=t) == 2 * s * b * h


@settings(max_examples=10)
@given(shape=shapes())
def test_llama_rows_add_up_to_the_closed_forms(shape):
    s, b, h, a, g, f = (
        shape.sequence,
        shape.batch,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.mlp,
    )
    rows = llama_layer(shape)
    lse = 4 * a * s * b
    assert saved_bytes(rows) == s * b * (12 * h + 4 * g * h // a + 8 * f) + lse
    without = saved_bytes(rows, recompute=["activation"])
    assert without == s * b * (12 * h + 4 * g * h // a + 6 * f) + lse
    statistics = 2 * 4 * s * b
    assert (
        saved_bytes(llama_layer(shape, "eager")) == saved_bytes(rows) + 12 * s * b * h + statistics
    )


# Korthikanti et al. 2022: Figure 1 (GiB on the first stage; none, and selective with sequence
# parallelism) and Figure 7 (percent of tensor parallelism alone: sp, selective, both, full).
MODELS = {
    "22B": (6144, 64, 48, 4, 1, 1, 59.25, 9.5625, (66.84, 49.42, 16.18, 7.64)),
    "175B": (12288, 96, 96, 1, 8, 3, 66.84375, 12.3515625, (62.04, 56.53, 18.49, 8.71)),
    "1T": (25600, 160, 128, 1, 64, 1, 131.25, 26.5625, (58.31, 62.04, 20.27, 9.42)),
}


@pytest.mark.parametrize("model", MODELS)
def test_published_activation_memory_is_reproduced(model):
    hidden, heads, layers, batch, pp, chunks, none, selective, percents = MODELS[model]
    shape = LayerShape(batch, 2048, hidden, heads)
    rows = gpt_layer(shape)
    interleaving = 1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1
    in_flight = layers * interleaving / 2**30

    baseline = saved_bytes(rows, tp=8)
    sp = saved_bytes(rows, tp=8, sp=True)
    core = saved_bytes(rows, tp=8, recompute=["core"])
    both = saved_bytes(rows, tp=8, sp=True, recompute=["core"])

    assert baseline * in_flight == pytest.approx(none, abs=1e-9)
    assert both * in_flight == pytest.approx(selective, abs=1e-9)
    for found, percent in zip((sp, core, both, input_bytes(shape, tp=8)), percents, strict=True):
        assert 100 * found / baseline == pytest.approx(percent, abs=0.15)


def test_selective_recomputation_drops_seventy_percent_of_gpt_3():
    rows = gpt_layer(LayerShape(1, 2048, 12288, 96))
    dropped = 1 - saved_bytes(rows, recompute=["core"]) / saved_bytes(rows)
    assert dropped == pytest.approx(0.70, abs=0.005)


B, S, H, A, G, WIDTH = 2, 64, 128, 4, 2, 192


class ByteMask(torch.autograd.Function):
    """Dropout that saves a byte an element, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, p):
        mask = torch.rand(x.shape) >= p
        ctx.save_for_backward(mask)
        return x * mask / (1 - p)


class FusedNorm(torch.autograd.Function):
    """RMS norm that saves its input alone."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.rms_norm(x, (H,), weight)


class Gpt(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(2))
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).view(B, S, 3, A, H // A)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(H // A), -1)
        y = (self.drop(weights) @ v).transpose(1, 2).reshape(B, S, H)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class Llama(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(H)) for _ in range(2))
        shared = G * H // A
        self.q, self.k, self.v, self.out, self.gate, self.up, self.down = (
            nn.Linear(before, after, bias=False)
            for before, after in (
                (H, H),
                (H, shared),
                (H, shared),
                (H, H),
                (H, WIDTH),
                (H, WIDTH),
                (WIDTH, H),
            )
        )
        self.register_buffer("cos", torch.ones(S, H // A))
        self.register_buffer("sin", torch.ones(S, H // A))

    def turn(self, x):
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat((-right, left), -1) * self.sin

    def forward(self, x):
        y = self.norm(x, self.scales[0])
        q, k, v = (p(y).view(B, S, -1, H // A).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(B, S, H))
        y = self.norm(x, self.scales[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def plain_norm(x, weight):
    return F.rms_norm(x, (H,), weight)


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        (Gpt(nn.Dropout(0.1)), gpt_layer(LayerShape(B, S, H, A), "eager")),
        (Gpt(lambda x: ByteMask.apply(x, 0.1)), gpt_layer(LayerShape(B, S, H, A), "fused")),
        (Llama(plain_norm), llama_layer(LayerShape(B, S, H, A, G, WIDTH), "eager")),
        (Llama(FusedNorm.apply), llama_layer(LayerShape(B, S, H, A, G, WIDTH), "fused")),
    ],
    ids=["gpt eager", "gpt fused", "llama eager", "llama fused"],
)
def test_what_is_measured_is_within_a_percent_of_the_table(layer, rows):
    layer = layer.to(torch.bfloat16)
    x = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    with measure([*layer.parameters(), *layer.buffers()]) as saved, torch.random.fork_rng([]):
        y = layer(x)
    assert y.requires_grad
    assert saved.live_bytes == pytest.approx(saved_bytes(rows), rel=0.01)


def test_the_table_refuses_what_is_no_shape_kernel_or_part():
    shape = LayerShape(1, 8, 8, 2)
    for bad in ({"batch": 0}, {"heads": 3}, {"kv_heads": 4}, {"mlp": 1.5}):
        with pytest.raises(PolicyError):
            LayerShape(**{"batch": 1, "sequence": 8, "hidden": 8, "heads": 2} | bad)
    with pytest.raises(PolicyError, match="fused or eager"):
        gpt_layer(shape, "magic")
    with pytest.raises(PolicyError, match="core, activation, norm"):
        saved_bytes(llama_layer(shape), recompute=["all"])
    with pytest.raises(PolicyError, match="tp must be"):
        saved_bytes(llama_layer(shape), tp=0)
