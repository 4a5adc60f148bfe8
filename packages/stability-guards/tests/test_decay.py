"""Weight decay pulls at matrices, whatever they are called and however they are cut."""

import itertools

import pytest
import torch
from torch import nn

from trainwright.stability_guards import (
    GuardError,
    check_initial_loss,
    decay_groups,
    decay_table,
    expected_initial_loss,
)

WHOLE = {"w": (2, 2), "ln_f.weight": (2,), "bias": (2,)}


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def step(parameters, **arguments):
    """One AdamW step with zero gradients: what moves is moved by weight decay alone."""
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    groups = decay_groups(parameters.items(), 0.1, **arguments)
    torch.optim.AdamW(groups, lr=0.1).step()


def test_norms_and_biases_do_not_decay_whatever_their_names():
    model = nn.ModuleDict(
        {
            "attn_nw": nn.LayerNorm(3),
            "proj": nn.Linear(3, 3),
            "conv": nn.Conv1d(3, 3, 1),
            "emb": nn.Embedding(4, 3),
        }
    )

    decayed, rest = names(decay_groups(model.named_parameters(), 0.1))

    assert decayed == ["proj.weight", "conv.weight", "emb.weight"]
    assert rest == ["attn_nw.weight", "attn_nw.bias", "proj.bias", "conv.bias"]


def test_one_step_decays_the_matrix_only():
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in WHOLE.items()}

    step(parameters)

    assert torch.allclose(parameters["w"], torch.tensor(0.99))
    assert parameters["ln_f.weight"].tolist() == parameters["bias"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("cuts", [(0, 3, 8), (0, 5, 8), (0, 3, 5, 8), (0, 0, 8)])
@pytest.mark.parametrize("as_function", [False, True])
def test_flat_shards_decay_as_the_whole_does(cuts, as_function):
    ndim = {name: len(shape) for name, shape in WHOLE.items()}
    places = {"w": (0, 4), "ln_f.weight": (4, 6), "bias": (6, 8)}
    joined = {name: [] for name in WHOLE}

    for start, stop in itertools.pairwise(cuts):
        shard = {
            name: nn.Parameter(torch.ones(min(stop, last) - max(start, first)))
            for name, (first, last) in places.items()
            if max(start, first) < min(stop, last)
        }
        step(shard, logical_ndim=(lambda name, _: ndim[name]) if as_function else ndim)
        for name, parameter in shard.items():
            joined[name] += parameter.tolist()

    assert joined["w"] == pytest.approx([0.99] * 4)
    assert joined["ln_f.weight"] == joined["bias"] == [1.0, 1.0]


def test_a_flat_shard_of_unknown_dims_is_refused():
    parameters = [("w", nn.Parameter(torch.ones(3)))]

    with pytest.raises(GuardError, match="logical_ndim says nothing of w"):
        decay_groups(parameters, 0.1, logical_ndim={"v": 2})


def test_overrides_rule_and_must_match_something():
    model = nn.ModuleDict({"emb": nn.Embedding(4, 3), "proj": nn.Linear(3, 3)})

    decayed, rest = names(
        decay_groups(model.named_parameters(), 0.1, overrides={"emb.*": False, "*.bias": True})
    )

    assert decayed == ["proj.weight", "proj.bias"]
    assert rest == ["emb.weight"]
    with pytest.raises(GuardError, match=r"'embed\.\*' matches none of 3"):
        decay_groups(model.named_parameters(), 0.1, overrides={"embed.*": False})


def test_tied_parameters_count_once_and_frozen_ones_not_at_all():
    weight = nn.Parameter(torch.ones(2, 2))
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)

    groups = decay_groups([("a", weight), ("b", weight), ("c", frozen)], 0.1)

    assert names(groups) == [["a"], []]


def test_an_optimizer_takes_groups_of_which_one_is_empty():
    groups = decay_groups([("w", nn.Parameter(torch.ones(2, 2)))], 0.1)

    optimizer = torch.optim.AdamW(groups, lr=0.1)

    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["param_names"] for group in optimizer.param_groups] == [["w"], []]


def test_a_rank_without_parameters_still_has_an_optimizer_of_two_groups():
    optimizer = torch.optim.AdamW(decay_groups([], 0.1), lr=0.1, fused=True)

    optimizer.step()

    assert [group["params"] for group in optimizer.param_groups] == [[], []]


def test_the_table_shows_each_parameter_before_and_after_the_optimizer_takes_it():
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in WHOLE.items()}
    groups = decay_groups({**parameters, "t": nn.Parameter(torch.ones(()))}.items(), 0.1)
    table = (
        "weight decay  shape   parameter\n"
        "0.1           2x2     w\n"
        "0             2       ln_f.weight\n"
        "0             2       bias\n"
        "0             scalar  t"
    )

    assert decay_table(groups) == table
    assert decay_table(torch.optim.AdamW(groups, lr=0.1).param_groups) == table


def test_a_negative_decay_is_refused():
    with pytest.raises(GuardError, match=r"weight_decay must be from 0, got -0\.1"):
        decay_groups([], -0.1)


def test_the_first_loss_is_about_the_logarithm_of_the_vocabulary():
    assert expected_initial_loss(256) == pytest.approx(5.545, abs=1e-3)
    check_initial_loss(5.6, 256)
    for loss in (2.0, float("nan")):
        with pytest.raises(GuardError, match=r"within 1\.0 of ln 256 = 5\.5452, got"):
            check_initial_loss(loss, 256)
    with pytest.raises(GuardError, match="vocab_size must be at least 1"):
        expected_initial_loss(0)
