"""Which parameters are gathered and reduced together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import SingleCommunicator
from trainwright.sharding.data import ShardPolicy, by_class, by_name, by_size, data_parallel
from trainwright.sharding.data.testing import Network, network_plans
from trainwright.sharding.data.units import UnitPlan, plan_units
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh, MeshShape


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def names(units: list[UnitPlan]) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.parameters for unit in units}


def test_without_a_rule_the_model_is_one_unit() -> None:
    model = Model()

    assert names(plan_units(model, None)) == {"": tuple(dict(model.named_parameters()))}


def test_a_nested_unit_takes_its_parameters_from_the_one_around_it() -> None:
    units = names(plan_units(Block(), by_class(nn.Sequential, nn.LayerNorm)))

    assert units == {
        "norm": ("norm.weight", "norm.bias"),
        "mlp": ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"),
    }


def test_a_tied_parameter_belongs_to_the_innermost_unit_that_holds_all_its_owners() -> None:
    model = Model()
    model.blocks[0].mlp[2].weight = model.blocks[0].mlp[0].weight

    units = names(plan_units(model, by_class(nn.Embedding, nn.Linear, Block)))

    assert units[""] == ("embedding.weight",)
    assert units["blocks.0"] == (
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
        "blocks.0.mlp.0.weight",
    )
    assert units["blocks.0.mlp.0"] == ("blocks.0.mlp.0.bias",)


def test_a_module_that_runs_in_two_places_is_one_unit() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"one": nn.Sequential(shared), "two": nn.Sequential(shared)})

    assert names(plan_units(model, by_class(nn.Linear))) == {
        "one.0": ("one.0.weight", "one.0.bias")
    }
    assert list(names(plan_units(model, by_class(nn.Sequential)))) == [""]


def test_a_parameter_that_is_to_be_alone_is_a_unit_named_after_it() -> None:
    model = Model()

    units = plan_units(model, by_class(Block), ["embedding.weight"])

    assert names(units)["embedding.weight"] == ("embedding.weight",)
    # The model, and not the embedding: the head reads it as well.
    assert next(u.module for u in units if u.name == "embedding.weight") is model


@given(plan=network_plans(), rule=st.sampled_from([None, by_class(nn.Linear), by_size(10)]))
def test_every_parameter_is_in_exactly_one_unit(plan, rule) -> None:  # type: ignore[no-untyped-def]
    model = Network(plan)

    found = [name for unit in plan_units(model, rule) for name in unit.parameters]

    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (("blocks.*",), ["blocks.0", "blocks.1"]),
        (("blocks.*.mlp", "head"), ["blocks.0.mlp", "blocks.1.mlp", "head"]),
        (("blocks.1.m*.[02]",), ["blocks.1.mlp.0", "blocks.1.mlp.2"]),
        (("*",), ["embedding", "blocks", "head"]),
        (("nothing",), []),
    ],
)
def test_a_star_in_a_name_stands_for_one_level(
    patterns: tuple[str, ...], chosen: list[str]
) -> None:
    rule = by_name(*patterns)

    assert [
        name for name, module in Model().named_modules() if name and rule(name, module)
    ] == chosen


@given(least=st.integers(1, 120))
def test_units_by_size_have_that_size_and_no_part_of_them_could_be_one(least: int) -> None:
    model = Model()
    rule = by_size(least)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}

    units = plan_units(model, rule)

    for unit in units:
        own = sum(sizes[name] for name in unit.parameters)
        assert unit.name == "" or own >= least
        assert not isinstance(unit.module, nn.ModuleList)
    left = next((unit for unit in units if unit.name == ""), None)
    assert sum(sizes[name] for unit in units if unit is not left for name in unit.parameters) == (
        sum(sizes.values()) - (sum(sizes[n] for n in left.parameters) if left else 0)
    )


def test_a_unit_that_never_runs_itself_is_refused_where_hooks_would_gather_it() -> None:
    mesh = Mesh(SingleCommunicator(), MeshShape())
    policy = ShardPolicy(stage=3, units=by_name("blocks"))

    with pytest.raises(ShardingError, match="chose blocks, a ModuleList, which never runs itself"):
        data_parallel(Model(), mesh, policy)

    assert "blocks" in data_parallel(Model(), mesh, policy, hooks=False).units


def test_the_output_layer_of_an_attention_is_no_unit_for_nobody_runs_it() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    mesh = Mesh(SingleCommunicator(), MeshShape())

    assert "self_attn.out_proj" not in names(plan_units(model, by_size(8)))
    with pytest.raises(
        ShardingError, match=r"chose self_attn.out_proj, .* choose modules .*around"
    ):
        data_parallel(model, mesh, ShardPolicy(stage=3, units=by_class(nn.Linear)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_layout_says_the_unit_of_each_group_and_no_bucket_crosses_it(stage: int) -> None:
    mesh = Mesh(SingleCommunicator(), MeshShape())

    policy = ShardPolicy(stage=stage, units=by_class(Block))
    parallel = data_parallel(Model(), mesh, policy, hooks=False)

    held = {
        part.name: group.unit
        for group in parallel.layout
        for bucket in group.buckets
        for part in bucket.parameters
    }
    expected = {n: ".".join(n.split(".")[:2]) if "blocks" in n else "" for n in held}
    assert held == expected
    assert list(parallel.units) == ["", "blocks.0", "blocks.1"]
    assert all(unit.is_gathered for unit in parallel.units.values())
    assert repr(parallel.units["blocks.0"]) == "Unit('blocks.0', 6 parameters)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing_gradients": "none"}, "must be 'zero' or 'error', got 'none'"),
        ({"live_units": 0}, "live_units must be at least 1, got 0"),
        ({"reduce_each_backward": True, "stage": 1}, "needs stage 2 or 3: gradients are whole"),
        (
            {"reduce_each_backward": True, "stage": 2, "missing_gradients": "error"},
            "cannot go with missing_gradients='error'",
        ),
    ],
)
def test_a_policy_that_contradicts_itself_says_why(options: dict, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        ShardPolicy(**options)


def test_frozen_units_are_gathered_but_not_reduced() -> None:
    model = Model()
    model.blocks[0].requires_grad_(False)
    mesh = Mesh(SingleCommunicator(), MeshShape())

    parallel = data_parallel(model, mesh, ShardPolicy(stage=3, units=by_class(Block)), hooks=False)

    trainable = {group.unit: group.key.trainable for group in parallel.layout}
    assert trainable == {"": True, "blocks.0": False, "blocks.1": True}
    assert torch.equal(parallel.frozen["blocks.0.norm.weight"].parameter, torch.ones(4))
