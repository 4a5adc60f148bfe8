"""Who decays follows from the modules that own a parameter, and how much from a schedule."""

import pytest
import torch
from torch import nn

from trainwright.stability_guards import (
    GuardError,
    SquareOf,
    Transition,
    decay_groups,
    decay_roles,
    decay_setter,
    linear,
)


class ForeignNorm(nn.Module):
    """A norm of one's own, whose gain is called as a matrix would be."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class ForeignTable(nn.Module):
    """An embedding that is no nn.Embedding, as one that is cut over ranks."""

    def __init__(self):
        super().__init__()
        self.num_embeddings, self.embedding_dim = 5, 4
        self.weight = nn.Parameter(torch.ones(5, 4))


class Experts(nn.Module):
    """Fused experts, with biases of two dims."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 4))
        self.bias = nn.Parameter(torch.ones(3, 4))


def model():
    return nn.ModuleDict(
        {
            "bias_embedding_norm": nn.Linear(4, 4),
            "proj": ForeignTable(),
            "layer": nn.LayerNorm((2, 4)),
            "group": nn.GroupNorm(1, 4),
            "batch": nn.BatchNorm1d(4),
            "rms": nn.RMSNorm(4),
            "vector": ForeignNorm(4),
            "plane": ForeignNorm(2, 4),
            "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "experts": Experts(),
            "tokens": nn.Embedding(5, 4),
            "bag": nn.EmbeddingBag(5, 4),
        }
    )


MATRICES = {
    "bias_embedding_norm.weight",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "experts.weight",
}
TABLES = {"proj.weight", "tokens.weight", "bag.weight"}


def decaying(roles):
    return {name for name, decays in roles.items() if decays}


def test_norms_biases_and_embeddings_do_not_decay_whatever_their_names_and_dims():
    modules = model()

    assert decaying(decay_roles(modules)) == MATRICES | {"plane.weight"}
    assert decaying(decay_roles(modules, exempt=(ForeignNorm,))) == MATRICES
    assert decaying(decay_roles(modules, embeddings=True, exempt=(ForeignNorm,))) == (
        MATRICES | TABLES
    )


def test_a_head_tied_to_an_embedding_does_not_decay_under_either_name():
    modules = nn.ModuleDict({"head": nn.Linear(4, 5, bias=False), "tokens": nn.Embedding(5, 4)})
    modules["tokens"].weight = modules["head"].weight

    assert decay_roles(modules) == {"head.weight": False, "tokens.weight": False}
    assert all(decay_roles(modules, embeddings=True).values())


def test_roles_survive_sharding_and_are_overruled_by_name():
    roles = decay_roles(model())
    shards = [(name, nn.Parameter(torch.ones(3))) for name in roles]

    groups = decay_groups(shards, 0.1, roles=roles, overrides={"tokens.*": True})

    found = {name for name, _ in groups[0]["params"]}
    assert found == MATRICES | {"plane.weight", "tokens.weight"}
    with pytest.raises(GuardError, match=r"roles say nothing of new\.weight"):
        decay_groups([("new.weight", shards[0][1])], 0.1, roles=roles)


def test_a_schedule_of_weight_decay_moves_the_groups_that_decay_and_no_others():
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    groups = [
        {"params": [weight], "weight_decay": decay}
        for weight, decay in zip(weights, (0.1, 0.0, 0.05), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    schedule = Transition(0.05, 0.1, 2, 2)  # as OPT-175B's was changed
    set_decay = decay_setter(optimizer)

    seen = []
    for update in range(5):
        set_decay(schedule(update))
        seen.append([group["weight_decay"] for group in optimizer.param_groups])
        # A state that is loaded replaces the groups.
        optimizer.load_state_dict(optimizer.state_dict())

    assert seen == [pytest.approx([d, 0.0, d / 2]) for d in (0.05, 0.05, 0.05, 0.075, 0.1)]
    set_decay(0.0)
    set_decay(0.2)
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_palms_weight_decay_is_the_square_of_its_rate():
    rate = linear(1e-2, 4, 10)

    assert [SquareOf(rate)(k) for k in range(10)] == [rate(k) ** 2 for k in range(10)]


def test_what_cannot_be_scheduled_is_refused():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], weight_decay=0.0)
    with pytest.raises(GuardError, match="no group of the optimizer decays"):
        decay_setter(optimizer)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], weight_decay=0.1)
    with pytest.raises(GuardError, match="weight decay must be from 0, got -1"):
        decay_setter(optimizer)(-1.0)
