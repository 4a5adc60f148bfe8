"""Hugging Face's models under the plans that ship compute what they compute in one process."""

import copy
import functools
from unittest.mock import ANY

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainwright.collectives import LocalWorld
from trainwright.sharding import (
    Mesh,
    MeshShape,
    ShardingError,
    placements_of,
    shard_spec,
    vocab_parallel_cross_entropy,
)
from trainwright.sharding.data import (
    ShardPolicy,
    by_class,
    data_parallel,
    full_state_dict,
    parameter_groups,
)
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.dropout import DropoutPlace
from trainwright.sharding.tensor.fused_head import linear_cross_entropy_sum
from trainwright.sharding.tensor.head_loss import HeadLoss
from trainwright.sharding.tensor.parallelize import parallelize, unparallelize
from trainwright.sharding.tensor.plans import (
    gpt2_plan,
    llama_plan,
    mistral_plan,
    plan_of,
    qwen_plan,
)
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.tensor.testing import SavedBytes, reduce_gradients_

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
    "mistral": (
        MistralForCausalLM,
        MistralConfig(**SIZES, sliding_window=3, attn_implementation="eager"),
        mistral_plan,
    ),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2_SIZES, **NO_DROPOUT), gpt2_plan),
}
# Two ranks need one and a half key/value heads each.
UNEVEN = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
MODELS["uneven"] = (LlamaForCausalLM, LlamaConfig(**{**SIZES, **UNEVEN}), llama_plan)
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


def build(kind, config, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).to(dtype)
        if dtype == torch.float64:
            compute_norms_in_float64_(model)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


@functools.cache
def plain(name, dtype):
    # Called outside of ranks first: they are threads and share one generator.
    kind, config, _ = MODELS[name]
    return build(kind, config, dtype)


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


@pytest.mark.parametrize(
    ("name", "kind", "ranks"),
    [
        *[(name, "parts", 4) for name in MODELS],
        ("llama", "parts", 1),
        ("llama", "whole", 4),
        ("uneven", "whole", 2),
        ("gpt2", "kept", 3),
    ],
)
def test_a_model_under_its_plan_is_the_model_in_one_process(name, kind, ranks):
    check_step(name, ranks, KINDS[kind])


@pytest.mark.parametrize("name", [name for name in MODELS if name != "uneven"])
def test_a_model_in_float32_is_as_near_as_float32_rounds(name):
    check_step(name, 2, None, dtype=torch.float32)


def parallel(comm, name, *, sequence=None, model=None, **options):
    _, config, plan = MODELS[name]
    mesh = Mesh(comm, MeshShape(tp=comm.size))
    model = copy.deepcopy(plain(name, torch.float64) if model is None else model)
    return parallelize(model, plan(config, comm.size, **options), mesh, sequence=sequence), mesh


def loss_by_logits(model, ids, tp):
    logits = model(ids).logits
    assert logits.shape[-1] == (7, 6)[tp.rank]
    cut = Cut.uneven(13, tp.size)
    return vocab_parallel_cross_entropy(logits[:, :-1], ids[:, 1:], tp, cut=cut).mean()


def loss_by_hidden_states(model, ids, tp):
    hidden = model.model(ids).last_hidden_state[:, :-1]
    weight = model.lm_head.weight
    loss = HeadLoss(cut=Cut.uneven(13, tp.size), chunk_tokens=4)
    total = linear_cross_entropy_sum(
        hidden, weight, ids[:, 1:], tp, loss=loss, input_is_entered=True
    )
    return total / ids[:, 1:].numel()


@pytest.mark.parametrize(
    ("loss_of", "sequence"),
    [
        (loss_by_logits, None),
        (loss_by_logits, KINDS["parts"]),
        (loss_by_hidden_states, KINDS["parts"]),
    ],
)
def test_a_part_of_the_vocabulary_goes_into_a_parallel_loss(loss_of, sequence):
    # The model's own loss is computed in float32.
    ids = tokens()
    model = copy.deepcopy(plain("llama", torch.float64))
    logits = model(ids).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    wanted.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5

    def run(comm):
        model, mesh = parallel(comm, "llama", sequence=sequence, gather_logits=False)
        loss = loss_of(model, ids, mesh.communicator("tp"))
        loss.backward()
        return loss.detach(), reduce_gradients_(model, mesh)

    for found, found_norm in LocalWorld(2).run(run):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=0)
        assert found_norm == pytest.approx(norm, rel=1e-11)


@pytest.mark.parametrize(("name", "kind"), [("llama", "parts"), ("gpt2", "kept")])
def test_recomputed_layers_have_the_same_gradients(name, kind):
    _, _, gradients = expected(name, torch.float64, 7)
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5

    def run(comm):
        model, mesh = parallel(comm, name, sequence=KINDS[kind])
        model.activation_checkpointing_enable()
        step(model)
        return reduce_gradients_(model, mesh)

    assert LocalWorld(2).run(run) == pytest.approx([norm] * 2, rel=1e-11)


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_sequences_of_several_lengths_are_recomputed_each_at_its_own(name):
    def losses(model):
        model.zero_grad()
        model.activation_checkpointing_enable()
        batches = [tokens(length=length) for length in (7, 8, 5)]
        return [model(ids, labels=ids, use_cache=False).loss for ids in batches]

    serial = copy.deepcopy(plain(name, torch.float64))
    sum(losses(serial)).backward()
    norm = sum(float(p.grad.square().sum()) for p in serial.parameters()) ** 0.5

    def run(comm):
        model, mesh = parallel(comm, name, sequence=KINDS["parts"])
        for loss in losses(model):  # all forwards come before the first backward
            loss.backward()
        return reduce_gradients_(model, mesh)

    assert LocalWorld(2).run(run) == pytest.approx([norm] * 2, rel=1e-11)


@pytest.mark.parametrize(("name", "kind"), [("qwen3", "whole"), ("gpt2", "parts")])
def test_a_cut_model_generates_what_the_whole_one_does(name, kind):
    ids = tokens(length=3)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    wanted = copy.deepcopy(plain(name, torch.float64)).eval().generate(ids, **options)

    def run(comm):
        model, _ = parallel(comm, name, sequence=KINDS[kind])
        return model.eval().generate(ids, **options)

    for found in LocalWorld(2).run(run):
        assert torch.equal(found, wanted)


def test_a_base_model_ends_whole_on_every_rank():
    base = plain("llama", torch.float64).model
    ids = tokens()
    wanted = copy.deepcopy(base)
    hidden = wanted(ids).last_hidden_state
    hidden.square().sum().backward()
    norm = sum(float(p.grad.square().sum()) for p in wanted.parameters()) ** 0.5

    def run(comm):
        model, mesh = parallel(
            comm, "llama", sequence=KINDS["parts"], model=base, base="", head=False
        )
        found = model(ids).last_hidden_state
        found.square().sum().backward()
        return found.detach(), reduce_gradients_(model, mesh)

    for found, found_norm in LocalWorld(3).run(run):
        torch.testing.assert_close(found, hidden.detach(), rtol=1e-11, atol=1e-12)
        assert found_norm == pytest.approx(norm, rel=1e-11)


def test_the_masks_of_gpt2_are_the_same_in_every_layout():
    drops = {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.0}
    model = build(GPT2LMHeadModel, GPT2Config(**GPT2_SIZES, **drops))

    def run(comm, sequence):
        mesh = Mesh(comm, MeshShape(tp=comm.size))
        cut = parallelize(
            copy.deepcopy(model),
            gpt2_plan(model.config, comm.size, dropout_seed=3),
            mesh,
            sequence=sequence,
            dropout_place=DropoutPlace(step=4),
        )
        loss, _ = step(cut)
        return float(loss), reduce_gradients_(cut, mesh)

    (alone,) = LocalWorld(1).run(run, None)
    evaluated = copy.deepcopy(model).eval()
    assert float(step(evaluated)[0]) != pytest.approx(alone[0], rel=1e-3)
    for ranks, sequence in ((2, None), (3, KINDS["parts"])):
        for found in LocalWorld(ranks).run(run, sequence):
            assert found == pytest.approx(alone, rel=1e-11)


def test_dropout_inside_attention_is_refused_in_training_only():
    llama = build(LlamaForCausalLM, LlamaConfig(**SIZES, attention_dropout=0.1))
    gpt2 = build(GPT2LMHeadModel, GPT2Config(**GPT2_SIZES))

    def run(comm):
        mesh = Mesh(comm, MeshShape(tp=2))
        with pytest.raises(ShardingError, match=r"self_attn\.attention_dropout .* p=0\.1"):
            parallelize(copy.deepcopy(llama), llama_plan(llama.config, 2), mesh)
        with pytest.raises(ShardingError, match=r"attn\.attn_dropout .* p=0\.1"):
            parallelize(
                copy.deepcopy(gpt2),
                gpt2_plan(gpt2.config, 2, dropout_seed=0),
                mesh,
                dropout_place=DropoutPlace(),
            )
        with pytest.raises(ShardingError, match=r"drop drops values .* Dropout"):
            parallelize(copy.deepcopy(gpt2).eval(), gpt2_plan(gpt2.config, 2), mesh).train()(
                tokens()
            )
        cut = parallelize(copy.deepcopy(llama).eval(), llama_plan(llama.config, 2), mesh)
        cut(tokens())
        with pytest.raises(ShardingError, match="call eval"):
            cut.train()(tokens())

    LocalWorld(2).run(run)


def test_what_qwen3_declares_of_itself_is_the_model_in_one_process():
    even = build(Qwen3ForCausalLM, Qwen3Config(**{**SIZES, "vocab_size": 16, "head_dim": 6}))

    def run(comm):
        mesh = Mesh(comm, MeshShape(tp=comm.size))
        model = parallelize(copy.deepcopy(even), plan_of(even), mesh)
        step(model)
        return reduce_gradients_(model, mesh), type(model.model.embed_tokens).__name__

    def refused(comm):
        with pytest.raises(ShardingError, match=r"k_proj: out_features 12 in units of 6 .* tp=4"):
            run(comm)

    (alone, _), *_ = LocalWorld(1).run(run)
    assert LocalWorld(2).run(run) == [(pytest.approx(alone, rel=1e-11), ANY)] * 2
    LocalWorld(4).run(refused)


def test_a_cut_model_trains_with_gathered_and_recomputed_layers_as_in_one_process():
    ids = tokens()

    def loss(model, batch):
        return model(batch, use_cache=False).logits.square().sum() / 100

    serial = copy.deepcopy(plain("llama", torch.float64))
    optimizer = torch.optim.AdamW(serial.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        loss(serial, ids).backward()
        optimizer.step()

    def run(comm):
        mesh = Mesh(comm, MeshShape(dp=2, tp=2))
        model = copy.deepcopy(plain("llama", torch.float64))
        parallelize(model, llama_plan(model.config, 2), mesh, sequence=KINDS["parts"])
        model.activation_checkpointing_enable()
        layers = by_class(type(model.model.layers[0]))
        cut = data_parallel(model, mesh, ShardPolicy(stage=3, units=layers))
        optimizer = torch.optim.AdamW(parameter_groups(cut, model.parameters()), lr=0.01)
        for _ in range(2):
            cut.zero_grad()
            loss(model, ids[mesh.coordinate("dp")].unsqueeze(0)).backward()
            cut.reduce()
            cut.wait()
            optimizer.step()
            cut.publish()
        return full_state_dict(cut)

    found = LocalWorld(4).run(run)[0]
    for key, wanted in serial.named_parameters():
        torch.testing.assert_close(found[key], wanted.detach(), rtol=1e-9, atol=1e-10, msg=key)


def test_a_layer_of_llama_moves_what_two_regions_move():
    def run(comm, sequence):
        calls = []
        model, _ = parallel(RecordingCommunicator(comm, calls), "llama", sequence=sequence)
        hidden = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
        position = model.model.rotary_emb(hidden, torch.arange(8).unsqueeze(0))
        layer = model.model.layers[1]
        del calls[:]
        own = hidden if sequence is None else hidden[:, comm.rank * 4 : comm.rank * 4 + 4]
        layer(own, position_embeddings=position).sum().backward()
        return sorted(call.operation for call in calls)

    reductions = LocalWorld(2).run(run, None)[0]
    kept = LocalWorld(2).run(run, KINDS["kept"])[0]
    parts = LocalWorld(2).run(run, KINDS["parts"])[0]
    assert reductions == ["all_reduce"] * 4
    assert kept == ["all_gather"] * 4 + ["reduce_scatter"] * 4
    assert parts == ["all_gather"] * 6 + ["reduce_scatter"] * 4


def test_a_layer_of_llama_keeps_parts_of_what_enters_its_two_regions():
    def kept(comm, sequence):
        model, _ = parallel(comm, "llama", sequence=sequence)
        hidden = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
        position = model.model.rotary_emb(hidden, torch.arange(8).unsqueeze(0))
        saved = SavedBytes(model.parameters())
        with saved.watch():
            model.model.layers[1](hidden, position_embeddings=position)
        return saved.total

    whole = LocalWorld(2).run(kept, KINDS["kept"])
    parts = LocalWorld(2).run(kept, KINDS["parts"])
    # Half of two inputs of [2, 8, 16] in float64.
    assert [a - b for a, b in zip(whole, parts, strict=True)] == [2 * 2 * 4 * 16 * 8] * 2


def test_a_cut_model_made_plain_is_the_model_and_saves_as_it():
    def run(comm):
        model, mesh = parallel(comm, "qwen2", sequence=KINDS["parts"])
        unparallelize(model, mesh)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model.state_dict(), step(model)[0]

    loss, _, _ = expected("qwen2", torch.float64, 7)
    for state, found in LocalWorld(3).run(run):
        assert torch.equal(found, loss)
        for key, wanted in plain("qwen2", torch.float64).state_dict().items():
            assert torch.equal(state[key], wanted)
