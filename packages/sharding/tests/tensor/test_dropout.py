"""Dropout by place: the same mask in every layout, other masks for other elements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import LocalWorld
from trainwright.sharding import Mesh, MeshShape, ShardingError
from trainwright.sharding.tensor import Cut, DropoutPlace, PlacedDropout, ShardedDim


def mask(shape, p=0.5, step=0, first_sample=0, shards=(), name="drop", seed=0):
    place = DropoutPlace(step, first_sample)
    return PlacedDropout(p, seed, name, place=place, shards=shards)(torch.ones(shape)) != 0


@settings(max_examples=15)
@given(data=st.data(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_layout_drops_the_same_elements(data, sizes):
    whole = mask(sizes)
    cuts = {}
    for dim, size in enumerate(sizes):
        ranks = data.draw(st.integers(1, 3))
        if ranks > 1:
            cuts[dim] = Cut.uneven(size, ranks)
    part = whole
    shards = []
    for dim, cut in cuts.items():
        rank = data.draw(st.integers(0, cut.num_ranks - 1))
        shards.append(ShardedDim(dim, rank, cut.num_ranks, cut))
        part = cut.take(part, dim, rank)

    assert torch.equal(mask(part.shape, shards=shards), part)


@settings(max_examples=10)
@given(samples=st.permutations(range(6)), rank=st.integers(0, 1))
def test_samples_in_any_order_and_micro_batch_drop_what_they_drop_in_the_whole_batch(samples, rank):
    whole = mask((6, 4, 3), step=5)
    shards = [ShardedDim(1, rank, 2)]
    part = whole.chunk(2, 1)[rank]
    dropout = PlacedDropout(0.5, 0, "drop", place=DropoutPlace(5), shards=shards)

    for chosen in (samples[:4], samples[4:]):
        found = dropout(torch.ones(len(chosen), 2, 3), torch.tensor(chosen)) != 0
        assert torch.equal(found, part[list(chosen)])
    for first in range(0, 6, 2):
        found = mask((2, 2, 3), step=5, first_sample=first, shards=shards)
        assert torch.equal(found, part[first : first + 2])


def test_masks_agree_where_ranks_hold_the_same_and_differ_where_they_hold_other_elements():
    # SHD-16: dp=2, tp=2.
    def run(world):
        mesh = Mesh(world, MeshShape(dp=2, tp=2))
        samples = ShardedDim(0, mesh.coordinate("dp"), 2)
        heads = ShardedDim(1, mesh.coordinate("tp"), 2)
        replicated = mask((2, 8, 8), shards=[samples])
        return replicated, mask((2, 8, 8), shards=[samples, heads])

    results = LocalWorld(4).run(run)

    replicated = [first for first, _ in results]
    assert torch.equal(replicated[0], replicated[1])
    assert torch.equal(replicated[2], replicated[3])
    masks = [replicated[0], replicated[2], *(second for _, second in results)]
    # Sharded by heads, ranks 0 and 2 hold the first heads of their samples; all four differ.
    assert len({tuple(m.flatten().tolist()) for m in masks[2:]}) == 4
    assert not torch.equal(masks[0], masks[1])


def test_context_ranks_have_masks_of_their_own_positions():
    parts = [mask((2, 8), shards=[ShardedDim(1, rank, 4)]) for rank in range(4)]

    assert torch.equal(torch.cat(parts, 1), mask((2, 32)))
    assert len({tuple(part.flatten().tolist()) for part in parts}) == 4


def test_other_steps_names_and_seeds_drop_other_elements():
    options = ({}, {"step": 1}, {"name": "other"}, {"seed": 1}, {"first_sample": 8})
    masks = [tuple(mask((4, 64), **option).flatten().tolist()) for option in options]

    assert len(set(masks)) == len(masks)


def test_a_share_of_p_is_dropped_and_the_rest_is_scaled_forward_and_backward():
    input = torch.full((64, 64), 3.0, dtype=torch.float64, requires_grad=True)

    output = PlacedDropout(0.25, 1, "drop")(input)
    output.sum().backward()

    kept = output != 0
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.02)
    assert torch.equal(output.detach(), kept * 3.0 * (1 / 0.75))
    assert torch.equal(input.grad, kept.double() * (1 / 0.75))


def test_nothing_is_dropped_in_evaluation_or_at_zero_and_everything_at_one():
    input = torch.ones(2, 3)

    assert PlacedDropout(0.5, 0, "drop").eval()(input) is input
    assert PlacedDropout(0.0, 0, "drop")(input) is input
    assert torch.equal(PlacedDropout(1.0, 0, "drop")(input), torch.zeros(2, 3))


def test_a_recomputed_forward_drops_what_the_first_one_dropped():
    place = DropoutPlace()
    model = nn.Sequential(nn.Linear(8, 8), PlacedDropout(0.5, 0, "drop", place=place))
    inputs = [torch.ones(2, 8, requires_grad=True) for _ in range(2)]
    outputs, kept = [], []
    for number, input in enumerate(inputs):
        with place.at(step=3, first_sample=2 * number):
            contexts = place.contexts
            outputs.append(checkpoint(model, input, use_reentrant=False, context_fn=contexts))
        kept.append(outputs[-1].detach() != 0)

    # The place stands elsewhere by now, and the backwards come in the other order.
    for number in (1, 0):
        model.zero_grad()
        outputs[number].sum().backward()
        expected = kept[number].sum(0) * 2.0
        torch.testing.assert_close(model[0].bias.grad, expected)
    assert not torch.equal(*kept)
    assert (place.step, place.first_sample) == (0, 0)


def test_the_generator_of_the_process_is_neither_read_nor_moved():
    before = torch.get_rng_state()
    first = mask((4, 4))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(mask((4, 4)), first)
    torch.set_rng_state(before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PlacedDropout(1.5, 0, "drop"), "p must be between 0 and 1, got 1.5"),
        (lambda: mask((2, 2), shards=[ShardedDim(1, 0, 2)] * 2), "each dim is cut once"),
        (lambda: mask((2, 2), shards=[ShardedDim(2, 0, 2)]), r"drop: dim 2 is cut, got shape"),
        (lambda: ShardedDim(0, 2, 2), "0 <= rank < ranks"),
        (lambda: ShardedDim(0, 0, 2, Cut.even(3, 3)), "one range on each of 2 ranks"),
        (
            lambda: mask((2, 2), shards=[ShardedDim(1, 0, 2, Cut.even(6, 2))]),
            "rank 0 has 3 of 6 indices of dim 1, got 2",
        ),
        (
            lambda: PlacedDropout(0.5, 0, "drop")(torch.ones(2, 2), torch.zeros(3).long()),
            "samples are one int64 for each of 2 samples",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(call, message):
    with pytest.raises(ShardingError, match=message):
        call()
