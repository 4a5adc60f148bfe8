"""Placements of parameters: what follows from them, and what is refused."""

import pytest
import torch
from torch import nn

from trainwright.collectives import Box, LocalWorld, SingleCommunicator
from trainwright.sharding import (
    ColumnParallelLinear,
    Mesh,
    MeshShape,
    ParameterPlacement,
    Partial,
    Replicate,
    RowParallelLinear,
    Shard,
    ShardingError,
    VocabParallelEmbedding,
    placements_of,
    shard_spec,
)


class Speaker(nn.Module):
    def __init__(self, placements, **parameters):
        super().__init__()
        self._placements = placements
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def parameter_placements(self):
        return self._placements


def single_mesh():
    return Mesh(SingleCommunicator(), MeshShape())


def test_a_dense_shard_is_reduced_over_data_and_replicated_over_data():
    placement = ParameterPlacement.sharded((6, 4), 0, rank=1, size=2)

    assert placement.boxes == (Box((3, 0), (6, 4)),)
    assert placement.reduction_axes == ("dp", "cp")
    assert placement.replicated_axes == ("dp", "cp")
    assert placement.gradient_on("tp") == Shard(0)


def test_a_replicated_weight_is_summed_over_tp_only_where_each_rank_sees_a_part():
    whole = ParameterPlacement.replicated((4,))
    partly = ParameterPlacement.replicated((4,), {"tp": Partial()})

    assert whole.reduction_axes == ("dp", "cp")
    assert partly.reduction_axes == ("dp", "cp", "tp")
    assert whole.replicated_axes == partly.replicated_axes == ("dp", "cp", "tp")


def test_a_gradient_that_every_data_rank_computes_alike_is_not_summed():
    placement = ParameterPlacement.replicated((4,), {"dp": Replicate(), "cp": Partial()})

    assert placement.reduction_axes == ("cp",)


def test_an_expert_lies_on_the_expert_axes():
    placement = ParameterPlacement.sharded((8, 4), 0, rank=0, size=2, axis="ep")

    assert placement.axes == ("edp", "ep", "etp")
    assert placement.reduction_axes == ("edp",)
    assert placement.replicated_axes == ("edp", "etp")


def test_a_weight_counts_as_replicated_over_stages_only_where_it_is_said():
    untied = ParameterPlacement.replicated((4,))
    tied = ParameterPlacement((4,), (Box((0,), (4,)),), {"pp": Replicate()}, {"pp": Partial()})

    assert "pp" not in untied.replicated_axes
    assert tied.replicated_axes == ("pp", "dp", "cp", "tp")
    assert tied.reduction_axes == ("pp", "dp", "cp")


def test_a_spec_names_the_axes_that_really_have_replicas():
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        sharded = ParameterPlacement.sharded((4, 2), 1, rank=mesh.coordinate("tp"), size=2)
        whole = ParameterPlacement.replicated((4,))
        return shard_spec("w", sharded, mesh), shard_spec("b", whole, mesh)

    weight, bias = LocalWorld(4).run(run)[1]

    assert (weight.name, weight.global_shape, weight.replicated) == ("w", (4, 2), ("dp",))
    assert weight.boxes == (Box((0, 1), (4, 2)),)
    assert (weight.start, weight.stop, weight.local_shape) == (0, 4, (4, 1))
    assert bias.replicated == ("dp", "tp")
    assert shard_spec("b", ParameterPlacement.replicated((4,)), single_mesh()).replicated == ()


def test_placements_cover_every_parameter_once_under_its_first_name():
    tp = SingleCommunicator()
    model = nn.ModuleDict(
        {
            "embed": VocabParallelEmbedding(6, 4, tp),
            "mix": nn.Sequential(ColumnParallelLinear(4, 8, tp, bias=True), nn.LayerNorm(8)),
            "out": RowParallelLinear(8, 4, tp, bias=True),
            "head": ColumnParallelLinear(4, 6, tp),
        }
    )
    model["head"].weight = model["embed"].weight

    found = placements_of(model)

    assert list(found) == [name for name, _ in model.named_parameters()]
    assert "head.weight" not in found
    assert found["mix.0.bias"].weight == {"tp": Shard(0)}
    assert found["out.weight"].weight == {"tp": Shard(1)}
    assert found["mix.1.weight"] == ParameterPlacement.replicated((8,))
    assert found["out.bias"].gradient_on("tp") == Replicate()


def test_a_plain_module_may_hold_a_parameter_that_a_parallel_one_speaks_for():
    shared = nn.Parameter(torch.zeros(4, 2))
    placement = ParameterPlacement.sharded((8, 2), 0, rank=0, size=2)
    plain = nn.Linear(2, 4, bias=False)
    plain.weight = shared
    model = nn.ModuleDict({"a": plain, "b": Speaker({"w": placement}, w=shared)})

    assert placements_of(model) == {"a.weight": placement}


def test_shared_parameters_placed_differently_are_refused():
    shared = nn.Parameter(torch.zeros(4, 4))
    rows = ParameterPlacement.sharded((8, 4), 0, rank=0, size=2)
    columns = ParameterPlacement.sharded((4, 8), 1, rank=0, size=2)
    model = nn.ModuleDict(
        {"a": Speaker({"w": rows}, w=shared), "b": Speaker({"w": columns}, w=shared)}
    )

    with pytest.raises(ShardingError, match=r"a\.w and b\.w are one parameter"):
        placements_of(model)


def test_speaking_for_a_foreign_parameter_is_refused():
    model = nn.ModuleDict(
        {"a": Speaker({"v": ParameterPlacement.replicated((1,))}, w=nn.Parameter(torch.zeros(1)))}
    )

    with pytest.raises(ShardingError, match=r"a\.v: Speaker places a parameter it does not have"):
        placements_of(model)


def test_a_parameter_of_another_size_than_its_boxes_is_refused():
    placement = ParameterPlacement.sharded((8, 4), 0, rank=0, size=2)
    model = Speaker({"w": placement}, w=nn.Parameter(torch.zeros(8, 4)))

    with pytest.raises(ShardingError, match="w has 32 elements but its boxes hold 16"):
        placements_of(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4,), (), {"xp": Shard(0)}), "unknown axis 'xp'"),
        (((4,), (), {"tp": Partial()}), "a weight cannot be Partial on tp"),
        (((4,), (), {"tp": Shard(1)}), "outside the 1 dimensions"),
        (((4,), (), {"tp": Shard(0)}, {"tp": Partial()}), "a shard's gradient is the same shard"),
        (((4,), (), {"tp": Shard(0)}, {"tp": Replicate()}), "a shard's gradient is the same"),
        (((4, 4), (), {"tp": Shard(0)}, {"tp": Shard(1)}), "a shard's gradient is the same"),
        (((4,), (), {}, {"tp": Shard(0)}), "a replicated weight's is Replicate"),
        (((4,), (), {"tp": Shard(0), "ep": Shard(0)}), "a parameter lies on"),
        (((4,), (Box((0,), (5,)),)), "is not inside global shape"),
        (((4,), (Box((0, 0), (1, 1)),)), "is not inside global shape"),
    ],
)
def test_contradictions_between_weight_and_gradient_are_refused(arguments, message):
    with pytest.raises(ShardingError, match=message):
        ParameterPlacement(*arguments)


@pytest.mark.parametrize("dim", [-1, 1.5, True])
def test_a_shard_counts_dims_from_the_front(dim):
    with pytest.raises(ShardingError, match="dim >= 0"):
        Shard(dim)


def test_an_uneven_cut_names_the_nearest_sizes_and_counts():
    with pytest.raises(ShardingError) as raised:
        ParameterPlacement.sharded((10, 4), 0, rank=0, size=4)

    message = str(raised.value)
    assert "dim 0 of shape (10, 4) is 10, which tp=4 does not divide" in message
    assert "nearest sizes that work are 8 or 12, the nearest tp 2 or 5" in message
