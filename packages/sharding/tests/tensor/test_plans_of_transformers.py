"""Hugging Face's models under the plans that ship compute what they compute in one process."""

import copy
import functools

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainwright.collectives import LocalWorld, SingleCommunicator
from trainwright.sharding import Mesh, MeshShape, placements_of, shard_spec
from trainwright.sharding.tensor.parallelize import parallelize, unparallelize
from trainwright.sharding.tensor.plans import (
    gpt2_plan,
    llama_plan,
    mistral_plan,
    plan_of,
    qwen_plan,
)
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.tensor.testing import reduce_gradients_

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"vocab_size": 13, "n_embd": 16, "n_inner": 10, "n_layer": 2, "n_head": 4}
GPT2_SIZES |= {"n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True), llama_plan),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True), qwen_plan),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6), qwen_plan),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=3), mistral_plan),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2_SIZES, **NO_DROPOUT), gpt2_plan),
}
KINDS = {
    "whole": None,
    "parts": SequenceSharding.keeping_shards(),
    "kept": SequenceSharding.keeping_whole(),
}


def compute_norms_in_float64_(model):
    """Put torch's norms in the place of those that compute in float32 whatever the dtype."""
    for parent in list(model.modules()):
        for key, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                other = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                setattr(parent, key, other.double())


@functools.cache
def plain(name, dtype=torch.float64):
    kind, config, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).to(dtype)
        if dtype == torch.float64:
            compute_norms_in_float64_(model)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def tokens(batch=2, length=7):
    return torch.randint(13, (batch, length), generator=torch.Generator().manual_seed(1))


def step(model, **options):
    """Return loss, logits and gradients of the model's own loss."""
    ids = tokens(**options)
    model.zero_grad()
    output = model(ids, labels=ids, use_cache=False)
    output.loss.backward()
    return output.loss.detach(), output.logits.detach()


@functools.cache
def expected(name, dtype, length):
    model = copy.deepcopy(plain(name, dtype))
    loss, logits = step(model, length=length)
    return loss, logits, {key: p.grad for key, p in model.named_parameters()}


def check_step(name, ranks, sequence, dtype=torch.float64, length=7):
    _, config, plan = MODELS[name]
    loss, logits, gradients = expected(name, dtype, length)
    square = sum(float(g.double().square().sum()) for g in gradients.values())

    def run(comm):
        mesh = Mesh(comm, MeshShape(tp=ranks))
        model = parallelize(
            copy.deepcopy(plain(name, dtype)), plan(config, ranks), mesh, sequence=sequence
        )
        found_loss, found_logits = step(model, length=length)
        norm = reduce_gradients_(model, mesh)
        placements = placements_of(model)
        found = {
            key: (shard_spec(key, placements[key], mesh), p.grad)
            for key, p in model.named_parameters()
        }
        return found_loss, found_logits, norm, found

    bound = 1e-5 if dtype == torch.float32 else 1e-12
    for found_loss, found_logits, norm, found in LocalWorld(ranks).run(run):
        torch.testing.assert_close(found_loss, loss, rtol=bound, atol=bound)
        torch.testing.assert_close(found_logits, logits, rtol=bound, atol=bound)
        assert norm == pytest.approx(square**0.5, rel=bound)
        assert list(found) == list(gradients)
        for key, (spec, gradient) in found.items():
            wanted = spec.extract(gradients[key]).view(gradient.shape)
            scale = float(gradients[key].abs().max())
            torch.testing.assert_close(gradient, wanted, rtol=0, atol=bound * scale, msg=f"{key}")


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_under_its_plan_is_the_model_in_one_process(name, kind, ranks):
    check_step(name, ranks, KINDS[kind])
