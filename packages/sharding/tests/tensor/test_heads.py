"""Which heads and rows a rank computes, and that shared key/value heads are summed once."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, differentiable
from trainwright.sharding import (
    Mesh,
    MeshShape,
    Partial,
    ShardingError,
    ShardPolicy,
    check_replicated_parameters,
    local_heads,
)
from trainwright.sharding.data.testing import finish, wrap_on
from trainwright.sharding.tensor import Cut, HeadLayout, KeyValueLinear
from trainwright.sharding.tensor.testing import reduce_gradients_
from trainwright.sharding.testing import mesh_of


@st.composite
def layouts(draw):
    kv_heads = draw(st.integers(1, 6))
    heads = kv_heads * draw(st.integers(1, 4))
    return HeadLayout(heads, kv_heads, draw(st.integers(1, 3)), draw(st.integers(1, heads)))


def test_two_key_heads_over_four_ranks_are_shared_by_pairs():
    # SHD-13.
    layout = HeadLayout(num_heads=8, num_kv_heads=2, head_dim=4, ranks=4)

    assert layout.kv_is_replicated
    assert [layout.kv_of(rank) for rank in range(4)] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert layout.kv_used_cut() == Cut(8, [[(0, 4)], [(0, 4)], [(4, 8)], [(4, 8)]])
    assert layout.kv_cut() == Cut.whole(8, 4)


def test_rows_fused_by_group_are_cut_by_group_and_parted_into_heads_in_order():
    # SHD-14: neither thirds nor local head counts.
    rows = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
    number = torch.arange(8)
    layout = HeadLayout(4, 2, 1, 2)
    cut = layout.fused_by_group()

    shards = [cut.take(number, 0, rank) for rank in range(2)]
    parts = HeadLayout(4, 2, 1, 1).parts_by_group(0)
    separate = [parts.take(number, 0, part) for part in range(3)]

    names = [[rows[i] for i in part.tolist()] for part in (*shards, *separate)]
    assert names == [
        ["q0", "q1", "k0", "v0"],
        ["q2", "q3", "k1", "v1"],
        ["q0", "q1", "q2", "q3"],
        ["k0", "k1"],
        ["v0", "v1"],
    ]
    assert torch.equal(cut.join(shards, 0), number)
    assert torch.equal(parts.join(separate, 0), number)


@settings(max_examples=15)
@given(layout=layouts())
def test_every_query_head_has_one_rank_and_finds_its_key_head_there(layout):
    group = layout.num_heads // layout.num_kv_heads
    heads = iter(range(layout.num_heads))
    for rank in range(layout.ranks):
        own = list(itertools.islice(heads, layout.num_local(rank)))
        assert own
        assert layout.kv_of(rank) == tuple(head // group for head in own)
        used = sorted(set(layout.kv_of(rank)))
        assert layout.num_local_kv(rank) == len(used)
        repeated = torch.tensor(used).repeat_interleave(torch.tensor(layout.repeats(rank)))
        assert tuple(repeated.tolist()) == layout.kv_of(rank)
    assert next(heads, None) is None
    sizes = [layout.num_local(rank) for rank in range(layout.ranks)]
    assert max(sizes) - min(sizes) <= 1
    assert layout.query_cut().is_partition
    assert layout.kv_cut().is_partition or layout.kv_is_replicated


@settings(max_examples=15)
@given(layout=layouts())
def test_both_fused_orders_give_each_rank_the_same_queries_keys_and_values(layout):
    whole = HeadLayout(layout.num_heads, layout.num_kv_heads, layout.head_dim, 1)
    by_block, by_group = whole.parts_by_block(0), whole.parts_by_group(0)
    blocks = torch.arange(by_block.size)
    groups = by_group.join([by_block.take(blocks, 0, part) for part in range(3)], 0)

    for rank in range(layout.ranks):
        of_blocks = layout.fused_by_block().take(blocks, 0, rank)
        of_groups = layout.fused_by_group().take(groups, 0, rank)
        for part in range(3):
            one = layout.parts_by_block(rank).take(of_blocks, 0, part)
            other = layout.parts_by_group(rank).take(of_groups, 0, part)
            assert torch.equal(one, other)
        used = layout.kv_used_cut()
        first = layout.num_heads * layout.head_dim
        keys = blocks[first : first + used.size]
        assert torch.equal(
            layout.parts_by_block(rank).take(of_blocks, 0, 1), used.take(keys, 0, rank)
        )


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((6, 4, 1, 2), "num_heads=6 must be a multiple of num_kv_heads=4"),
        ((2, 1, 1, 4), "num_heads=2 cannot be shared out over tp=4.*tp is at most 2"),
        ((0, 1, 1, 1), "are positive"),
        ((4, 2, 1, 0), "are positive"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_by_their_numbers(numbers, message):
    with pytest.raises(ShardingError, match=message):
        HeadLayout(*numbers)


def test_equal_shares_are_refused_where_there_are_none_and_the_layout_is_named():
    with pytest.raises(ShardingError, match=r"num_kv_heads=2 is less than tp=4.*HeadLayout"):
        local_heads(8, 2, 4)


@pytest.mark.parametrize(("dp", "stage"), [(1, 0), (2, 1), (2, 2), (2, 3)])
def test_shared_key_gradients_are_summed_for_weight_and_bias_on_every_optimizer_path(dp, stage):
    # SHD-11: terms 1.0 and 2.0 of the weight, 0.5 and 0.25 of the bias.
    inputs, upstream = (2.0, 8.0), (0.5, 0.25)

    def run(world):
        mesh = Mesh(world, MeshShape(dp=dp, tp=2))
        tp = mesh.communicator("tp")
        layer = KeyValueLinear(1, 1, tp, cut=Cut.whole(1, 2), bias=True, dtype=torch.float64)
        parallel = wrap_on(mesh, layer, ShardPolicy(stage=stage, alignment=1))
        output = layer(torch.full((1, 1), inputs[tp.rank], dtype=torch.float64))
        (upstream[tp.rank] * output.sum() / dp).backward()
        return finish(parallel)

    results = LocalWorld(2 * dp).run(run)

    for name, total in (("weight", 3.0), ("bias", 0.75)):
        for tp in range(2):
            held = [results[2 * replica + tp].get(name, 0.0) for replica in range(dp)]
            assert (held[0] if stage == 0 else sum(held)) == total


@pytest.mark.parametrize("enters", [False, True])
def test_the_input_gradient_of_shared_keys_is_summed_once(enters):
    # SHD-25: x = 2, Wk = 3, the ranks' query heads give dK = 1 and 4.
    def run(tp):
        layer = KeyValueLinear(1, 1, tp, cut=Cut.whole(1, 2), input_is_entered=enters)
        torch.nn.init.constant_(layer.weight, 3.0)
        own = torch.full((1, 1), 2.0, requires_grad=True)
        hidden = differentiable.replicate_to_partial(own, tp) if enters else own
        layer(hidden).backward(torch.full((1, 1), (1.0, 4.0)[tp.rank]))
        assert layer.parameter_placements()["weight"].gradient_on("tp") == Partial()
        reduce_gradients_(layer, mesh_of(tp))
        check_replicated_parameters(layer, mesh_of(tp))
        return layer.weight.grad.item(), own.grad.item()

    assert LocalWorld(2).run(run) == [(10.0, 15.0)] * 2


def test_repeated_heads_stand_beside_each_other_and_their_gradients_add_up():
    layout = HeadLayout(6, 3, 2, 2)

    def run(tp):
        cut = layout.kv_used_cut()
        options = {"cut": cut, "repeats": layout.repeats(tp.rank), "bias": True}
        layer = KeyValueLinear(1, 6, tp, **options)
        torch.nn.init.zeros_(layer.weight)
        with torch.no_grad():
            layer.bias.copy_(torch.arange(6.0))
        output = layer(torch.ones(1, 1))
        output.sum().backward()
        return output.tolist(), layer.bias.grad.tolist()

    assert LocalWorld(2).run(run) == [
        ([[0.0, 1.0, 0.0, 1.0, 2.0, 3.0]], [2.0, 2.0, 1.0, 1.0, 0.0, 0.0]),
        ([[2.0, 3.0, 4.0, 5.0, 4.0, 5.0]], [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]),
    ]
