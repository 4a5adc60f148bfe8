"""Hugging Face's blocks of experts and the layer compute the same from the same state dict."""

import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import (
    MixtralSparseMoeBlock,
    load_balancing_loss_func,
)
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.sharding import Mesh, MeshShape, ShardingError
from trainwright.sharding.expert import (
    MIXTRAL_NAMES,
    QWEN_NAMES,
    MixtureOfExperts,
    Routing,
    stack_experts,
    unstack_experts,
)
from trainwright.sharding.expert.testing import sum_gradients
from trainwright.sharding.testing import load_plain_

D, F, E = 16, 12, 8
SIZES = {"hidden_size": D, "num_experts_per_tok": 3, "moe_intermediate_size": F}
QWEN2 = {"shared_expert_intermediate_size": 10, "norm_topk_prob": False}
DEEPSEEK = {"n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
BLOCKS = {
    "mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(
            hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=3
        ),
        Routing(E, 3),
        {},
    ),
    "qwen2": (
        Qwen2MoeSparseMoeBlock,
        Qwen2MoeConfig(num_experts=E, **SIZES, **QWEN2),
        Routing(E, 3, normalize=False),
        {"shared_width": 10, "shared_gate": True},
    ),
    "qwen3": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(num_experts=E, **SIZES, norm_topk_prob=True),
        Routing(E, 3),
        {},
    ),
    "deepseek": (
        DeepseekV3MoE,
        DeepseekV3Config(n_routed_experts=E, **SIZES, **DEEPSEEK),
        Routing(E, 3, score="sigmoid", scale=2.5, groups=4, top_groups=2, biased=True),
        {"shared_width": 2 * F},
    ),
}


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def theirs(name):
    kind, config, _, _ = BLOCKS[name]
    config._experts_implementation = "eager"
    block = kind(config)
    with torch.no_grad():
        for seed, tensor in enumerate((*block.parameters(), *block.buffers())):
            tensor.copy_(draw(*tensor.shape, seed=seed, scale=0.3))
    return block


@pytest.mark.parametrize("layout", ["dp=1", "dp=2,tp=2,ep=4,etp=1"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_transformers_and_the_layer_compute_the_same(name, layout):
    block = theirs(name)
    _, _, routing, shared = BLOCKS[name]
    hidden = draw(2, 5, D, seed=7).requires_grad_()
    upstream = draw(2, 5, D, seed=8)
    expected = block(hidden)
    (expected * upstream).sum().backward()
    state = stack_experts(unstack_experts(block.state_dict()))

    def run(world):
        mesh = Mesh(world, MeshShape.parse(layout))
        layer = MixtureOfExperts(D, F, routing, mesh, **shared)
        load_plain_(layer, state, mesh)
        if routing.biased:
            layer.gate.e_score_correction_bias.copy_(state["gate.e_score_correction_bias"])
        rows = (
            slice(2) if world.size == 1 else slice(mesh.coordinate("dp"), mesh.coordinate("dp") + 1)
        )
        own = hidden.detach()[rows].clone().requires_grad_()
        output, _ = layer(own)
        (output * upstream[rows]).sum().backward()
        return rows, output.detach(), own.grad, sum_gradients(layer, mesh)

    size = MeshShape.parse(layout).world_size
    for rows, output, given, gradients in LocalWorld(size).run(run):
        torch.testing.assert_close(output, expected.detach()[rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(given, hidden.grad[rows], rtol=1e-5, atol=1e-5)
        wanted = stack_experts({key: p.grad for key, p in block.named_parameters()})
        assert gradients.keys() == wanted.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
def test_a_whole_state_dict_loads_without_renaming(name):
    _, _, routing, shared = BLOCKS[name]
    layer = MixtureOfExperts(D, F, routing, Mesh(SingleCommunicator(), MeshShape()), **shared)
    assert layer.load_state_dict(theirs(name).state_dict()).missing_keys == []


def test_their_balance_loss_is_top_k_times_that_of_a_microbatch():
    block = theirs("mixtral")
    layer = MixtureOfExperts(
        D, F, Routing(E, 3, scope="microbatch"), Mesh(SingleCommunicator(), MeshShape())
    )
    layer.load_state_dict(block.state_dict())
    hidden = draw(2, 5, D)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[0, 3:] = False
    logits, _, _ = block.gate(hidden)

    _, report = layer(hidden, valid)
    expected = load_balancing_loss_func((logits,), E, 3, valid)

    assert 3 * report.balance.item() / 8 == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("names", [QWEN_NAMES, MIXTRAL_NAMES])
def test_names_of_experts_and_stacks_are_one_to_one(names):
    state = {f"layers.1.mlp.{key}": value for key, value in theirs("qwen2").state_dict().items()}

    apart = unstack_experts(state, names)
    again = stack_experts(apart)

    assert f"layers.1.mlp.experts.7.{names.up}.weight" in apart
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], value) for key, value in state.items())
    del apart[f"layers.1.mlp.experts.2.{names.up}.weight"]
    with pytest.raises(ShardingError, match=r"layers.1.mlp.experts has no 2.up_proj"):
        stack_experts(apart)
