"""Models of several families, small, for the law."""

from __future__ import annotations

import attrs

from tests.serial import GROUPED, SPARSE
from trainwright.integration.model import ExpertShape, LatentShape
from trainwright.integration.model.rotary import Llama3Scaling
from trainwright.sharding.expert import Routing

LLAMA = attrs.evolve(GROUPED, layers=4)
TIED = attrs.evolve(LLAMA, tied=True)
GPT2 = attrs.evolve(
    LLAMA,
    kv_heads=8,
    norm="layer",
    positions="learned",
    max_positions=20,
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    tied=True,
)
QWEN3 = attrs.evolve(LLAMA, qk_norm=True, head_features=6)
QWEN2 = attrs.evolve(LLAMA, qkv_bias=True, qk_norm=True, rope_scaling=Llama3Scaling(4, 1, 4, 12))
BIASED = attrs.evolve(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True, activation="gelu")
QWEN_MOE = attrs.evolve(
    SPARSE,
    qk_norm=True,
    experts=ExpertShape(Routing(8, 2, normalize=False), 24, 24, 0.1, 0.01, shared_gate=True),
    dense_layers=(1, 2),
)
DEEPSEEK = attrs.evolve(
    SPARSE,
    experts=ExpertShape(
        Routing(8, 2, score="sigmoid", scale=2.5, groups=4, top_groups=2, biased=True), 24, 24, 0.1
    ),
    dense_layers=(0,),
)
LATENT = attrs.evolve(
    DEEPSEEK,
    kv_heads=8,
    latent=LatentShape(keys=12, plain=6, turned=4, values=8, queries=20),
    qkv_bias=True,
    output_bias=True,
)
FAMILIES = {
    "llama": LLAMA,
    "tied": TIED,
    "gpt2": GPT2,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "biased": BIASED,
    "mixtral": SPARSE,
    "qwen-moe": QWEN_MOE,
    "deepseek": DEEPSEEK,
    "latent": LATENT,
}
