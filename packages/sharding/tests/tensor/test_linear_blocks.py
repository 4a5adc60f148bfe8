"""A block of all layers is the plain block in every layout: output, every gradient, the norm."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld
from trainwright.sharding import (
    Mesh,
    MeshShape,
    ShardPolicy,
    check_replicated_parameters,
    data_parallel,
    full_state_dict,
    placements_of,
    shard_spec,
)
from trainwright.sharding.tensor import Cut, SequenceSharding
from trainwright.sharding.tensor.testing import (
    BlockPlan,
    ParallelBlock,
    PlainBlock,
    reduce_gradients_,
)
from trainwright.sharding.testing import (
    assert_close,
    check_pieces_tile_the_parameters,
    load_plain_,
    mesh_of,
)

TERMS = 512


def batch(plan, length, seed=1, samples=2):
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, length, plan.width)
    return [torch.randn(shape, dtype=plan.dtype, generator=generator) for _ in range(2)]


def sequence_of(kind, length):
    if kind == "off":
        return None
    make = SequenceSharding.keeping_shards if kind == "shards" else SequenceSharding.keeping_whole
    return make(length=length)


@st.composite
def block_plans(draw):
    heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 1), (6, 3), (5, 5), (8, 2)]))
    return BlockPlan(
        heads,
        kv_heads,
        middle=draw(st.integers(1, 6)),
        fused=draw(st.sampled_from(["none", "block", "group"])),
        bias=draw(st.booleans()),
        p=draw(st.sampled_from([0.0, 0.25])),
    )


@settings(max_examples=12)
@given(
    plan=block_plans(),
    size=st.integers(1, 4),
    kind=st.sampled_from(["off", "shards", "whole"]),
    enters=st.booleans(),
    length=st.integers(1, 6),
)
@example(plan=BlockPlan(8, 2), size=4, kind="shards", enters=True, length=3)
@example(plan=BlockPlan(6, 3), size=2, kind="off", enters=False, length=2)
@example(plan=BlockPlan(6, 3, fused="group"), size=4, kind="whole", enters=True, length=5)
def test_a_block_in_parallel_is_the_plain_block(plan, size, kind, enters, length):
    plain = PlainBlock(plan)
    input, upstream = batch(plan, length)
    whole = input.clone().requires_grad_()
    expected = plain(whole)
    expected.backward(upstream)
    cut = Cut.whole(length, size) if kind == "off" else Cut.uneven(length, size)

    def run(tp):
        mesh = mesh_of(tp)
        block = ParallelBlock(plan, tp, sequence_of(kind, length), enters)
        load_plain_(block, plain.state_dict(), mesh)
        own = cut.take(input, 1, tp.rank).clone().requires_grad_()
        output = block(own)
        output.backward(cut.take(upstream, 1, tp.rank))
        norm = reduce_gradients_(block, mesh)
        check_replicated_parameters(block, mesh)
        placements = placements_of(block)
        gradients = {
            name: (parameter.grad, shard_spec(name, placements[name], mesh))
            for name, parameter in block.named_parameters()
        }
        for parameter in block.parameters():
            parameter.grad = torch.ones_like(parameter)
        for name, placement in placements.items():
            if placement.reduction_axes[-1:] == ("tp",):
                # A term of a gradient of ones.
                block.get_parameter(name).grad /= size
        return output.detach(), own.grad, gradients, norm, reduce_gradients_(block, mesh)

    results = LocalWorld(size).run(run)

    assert_close("output", cut.join([r[0] for r in results], 1), expected.detach(), terms=TERMS)
    assert_close("input gradient", cut.join([r[1] for r in results], 1), whole.grad, terms=TERMS)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    count = sum(gradient.numel() for gradient in gradients.values())
    # A gradient may cancel to much less than its terms.
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for _, _, found, own_norm, norm_of_ones in results:
        for name, gradient in gradients.items():
            part, spec = found[name]
            expected_part = spec.extract(gradient).view(part.shape)
            assert_close(name, part, expected_part, terms=TERMS, scale=scale)
        assert own_norm == pytest.approx(norm, rel=1e-11)
        assert norm_of_ones == pytest.approx(math.sqrt(count), rel=1e-12)


@pytest.mark.parametrize("fused", ["none", "block", "group"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_element_of_a_block_counts_on_exactly_one_rank(fused, size):
    for heads in ((4, 2), (4, 1), (5, 5)):
        plan = BlockPlan(*heads, fused=fused)
        check_pieces_tile_the_parameters(lambda tp, plan=plan: ParallelBlock(plan, tp), size)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["off", "shards"])
def test_an_update_under_every_sharding_stage_is_that_of_one_process(stage, kind):
    # SHD-11 and SHD-25 on every optimizer path: two key/value heads over three tensor ranks.
    plan = BlockPlan(4, 2, middle=4)
    plain = PlainBlock(plan)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    input, upstream = batch(plan, 4, samples=4)
    plain(input).backward(upstream)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    cut = Cut.whole(4, 3) if kind == "off" else Cut.uneven(4, 3)

    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, tp=3))
        tp, dp = mesh.communicator("tp"), mesh.coordinate("dp")
        block = ParallelBlock(plan, tp, sequence_of(kind, 4))
        block.drop.place.first_sample = 2 * dp
        load_plain_(block, before, mesh)
        parallel = data_parallel(block, mesh, ShardPolicy(stage=stage))
        pieces = [piece.parameter for piece in parallel.pieces.values()]
        optimizer = torch.optim.SGD(pieces, lr=0.1)
        part, up = (cut.take(x.chunk(2)[dp], 1, tp.rank) for x in (input, upstream))
        block(part.clone()).backward(up)
        parallel.reduce()
        parallel.wait()
        optimizer.step()
        parallel.publish()
        return full_state_dict(parallel)

    updated = LocalWorld(6).run(run)[0]

    assert updated.keys() == before.keys()
    for name, tensor in plain.state_dict().items():
        assert_close(name, updated[name], tensor, terms=TERMS)
