"""Sequence parallelism: round trips, partial gradients of norms, traffic and kept bytes."""

# Elements of a gathered activation: s positions, b samples, h wide.

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainwright.collectives import LocalWorld
from trainwright.sharding import (
    ColumnParallelLinear,
    Partial,
    RowParallelLinear,
    ShardingError,
    check_replicated_parameters,
    placements_of,
)
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor import (
    Cut,
    PlacedDropout,
    SequenceSharding,
    ShardedDim,
    enter_sequence,
    gather_sequence,
    leave_sequence,
    place_partial_,
    split_sequence,
    unplace_partial_,
)
from trainwright.sharding.tensor.testing import (
    BlockPlan,
    ParallelBlock,
    SavedBytes,
    reduce_gradients_,
)
from trainwright.sharding.testing import load_plain_, mesh_of

KINDS = {
    "shards": SequenceSharding.keeping_shards(),
    "whole": SequenceSharding.keeping_whole(),
}
both_kinds = pytest.mark.parametrize("kind", ["shards", "whole"])
PLAN = BlockPlan(num_heads=4, num_kv_heads=4, head_dim=2, width=8, middle=8, p=0.0)


class Scale(nn.Module):
    """A foreign norm: a weight and a bias over values that are normalised already."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, input):
        return input * self.weight + self.bias


def test_the_gradients_of_a_norm_on_positions_are_summed_over_the_ranks():
    # SHD-04: parts 3 and 7 of the weight, 2 and 2 of the bias.
    def run(tp):
        norm = place_partial_(Scale())
        values = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        norm(split_sequence(values, tp, SequenceSharding(0))).sum().backward()
        parts = norm.weight.grad.item(), norm.bias.grad.item()
        reduce_gradients_(norm, mesh_of(tp))
        check_replicated_parameters(norm, mesh_of(tp))
        return parts, norm.weight.grad.item(), norm.bias.grad.item()

    results = LocalWorld(2).run(run)

    assert [parts for parts, *_ in results] == [(3.0, 2.0), (7.0, 2.0)]
    assert [rest for _, *rest in results] == [[10.0, 4.0]] * 2


def test_a_norm_shared_by_heads_on_several_ranks_is_summed_without_sequence_parallelism_too():
    # SHD-05: head values 3 and 7.
    def run(tp):
        norm = place_partial_(nn.RMSNorm(1))
        (norm.weight * (3.0, 7.0)[tp.rank]).sum().backward()
        reduce_gradients_(norm, mesh_of(tp))
        return norm.weight.grad.item()

    assert LocalWorld(2).run(run) == [10.0, 10.0]


def test_scatter_and_gather_over_a_group_of_ones_own_are_the_identity():
    # SHD-07: the default groups are {0, 1} and {2, 3}, the explicit ones {0, 2} and {1, 3}.
    samples = torch.tensor([[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]])
    sequence = SequenceSharding(0)

    def run(world):
        default = world.split(world.rank // 2)
        explicit = world.split(world.rank % 2)
        sample = samples[world.rank % 2]
        part = split_sequence(sample, explicit, sequence)
        assert default.size == explicit.size == 2
        return gather_sequence(part, explicit, sequence).tolist()

    assert LocalWorld(4).run(run) == [samples[rank % 2].tolist() for rank in range(4)]


@settings(max_examples=10)
@given(
    size=st.integers(1, 4),
    length=st.integers(0, 9),
    dim=st.integers(0, 2),
    keeps_whole=st.booleans(),
)
def test_sequences_of_any_length_go_in_and_out_with_the_gradients_of_their_placement(
    size, length, dim, keeps_whole
):
    shape = [2, 1, 3]
    shape[dim] = length
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    cut = Cut.uneven(length, size)

    def run(tp):
        sequence = SequenceSharding(dim, keeps_whole, length)
        own = whole.clone().requires_grad_()
        part = split_sequence(own, tp, sequence)
        gathered = gather_sequence(part, tp, sequence)
        entered = enter_sequence(part, tp, sequence)
        left = leave_sequence(entered, tp, sequence)
        outputs = (part, gathered, entered, left)
        given = (part, whole, whole, part)
        gradients = [
            torch.autograd.grad(out, own, up.detach(), retain_graph=True)[0]
            for out, up in zip(outputs, given, strict=True)
        ]
        return [output.detach() for output in outputs], gradients

    for rank, (outputs, gradients) in enumerate(LocalWorld(size).run(run)):
        part = cut.take(whole, dim, rank)
        for found, expected in zip(outputs, (part, whole, whole, size * part), strict=True):
            torch.testing.assert_close(found, expected)
        for found, factor in zip(gradients, (1, 1, size, size), strict=True):
            torch.testing.assert_close(found, factor * whole)


@settings(max_examples=6)
@given(
    size=st.integers(2, 4),
    length=st.integers(1, 5),
    middle=st.integers(1, 6),
    keeps_whole=st.booleans(),
)
def test_a_middle_that_is_gathered_and_cut_again_is_that_of_one_process(
    size, length, middle, keeps_whole
):
    generator = torch.Generator().manual_seed(9)
    plain = nn.Sequential(nn.Linear(3, middle), nn.Tanh(), nn.Linear(middle, 2)).double()
    input = torch.randn(2, length, 3, generator=generator, dtype=torch.float64).requires_grad_()
    upstream = torch.randn(2, length, 2, generator=generator, dtype=torch.float64)
    expected = plain(input)
    expected.backward(upstream)
    positions, features = Cut.uneven(length, size), Cut.uneven(middle, size)

    def run(tp):
        options = {
            "cut": features,
            "bias": True,
            "sequence": SequenceSharding(1, keeps_whole, length),
            "dtype": torch.float64,
        }
        up = ColumnParallelLinear(3, middle, tp, gather_output=True, **options)
        down = RowParallelLinear(middle, 2, tp, input_is_parallel=False, **options)
        model = nn.Sequential(up, nn.Tanh(), down)
        load_plain_(model, plain.state_dict(), mesh_of(tp))
        own = positions.take(input.detach(), 1, tp.rank).clone().requires_grad_()
        output = model(own)
        output.backward(positions.take(upstream, 1, tp.rank))
        norm = reduce_gradients_(model, mesh_of(tp))
        return output.detach(), own.grad, up.weight.grad, down.weight.grad, down.bias.grad, norm

    gradients = [parameter.grad for parameter in plain.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    for rank, (output, own, up, down, bias, own_norm) in enumerate(LocalWorld(size).run(run)):
        torch.testing.assert_close(output, positions.take(expected.detach(), 1, rank))
        torch.testing.assert_close(own, positions.take(input.grad, 1, rank))
        torch.testing.assert_close(up, features.take(gradients[0], 0, rank))
        torch.testing.assert_close(down, features.take(gradients[2], 1, rank))
        torch.testing.assert_close(bias, gradients[3])
        assert own_norm == pytest.approx(norm, rel=1e-12)


def traffic(sequence, enters, size=2, length=4, samples=3):
    """Return the elements that a rank moves in a block, forward and backward, by operation."""
    whole = torch.ones(samples, length, PLAN.width, dtype=PLAN.dtype)

    def run(tp):
        calls = []
        block = ParallelBlock(PLAN, RecordingCommunicator(tp, calls), sequence, enters)
        cut = Cut.whole(length, size) if sequence is None else Cut.even(length, size)
        output = block(cut.take(whole, 1, tp.rank).clone().requires_grad_())
        forward = list(calls)
        output.sum().backward()
        return [[(call.operation, call.numel) for call in part] for part in (forward, calls)]

    results = LocalWorld(size).run(run)
    assert all(result == results[0] for result in results)
    forward, everything = results[0]
    return forward, everything[len(forward) :]


@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_moves_eight_parts_with_whole_inputs_and_ten_with_shards(size):
    # FACTS: in units of s·b·h·(t-1)/t; an all-reduce moves two of them.
    elements = 3 * 4 * PLAN.width
    gather, scatter = ("all_gather", elements), ("reduce_scatter", elements)
    reduce = ("all_reduce", elements)

    assert traffic(None, True, size) == ([reduce] * 2, [reduce] * 2)
    forward, backward = traffic(KINDS["whole"], True, size)
    assert forward == [gather, scatter] * 2
    assert sorted(backward) == sorted([gather, scatter] * 2)
    forward, backward = traffic(KINDS["shards"], True, size)
    assert forward == [gather, scatter] * 2
    assert sorted(backward) == sorted([gather, gather, scatter] * 2)


def kept_bytes(sequence, size=2):
    whole = torch.ones(2, 8, PLAN.width, dtype=PLAN.dtype)

    def run(tp):
        block = ParallelBlock(PLAN, tp, sequence)
        cut = Cut.whole(8, size) if sequence is None else Cut.even(8, size)
        saved = SavedBytes(block.parameters())
        own = cut.take(whole, 1, tp.rank).clone().requires_grad_()
        with saved.watch():
            block(own)
        return saved.total

    totals = LocalWorld(size).run(run)
    assert totals[0] == totals[1]
    return totals[0]


def test_shards_keep_less_than_whole_inputs_by_what_they_do_not_hold_of_two_inputs():
    one = 2 * 8 * PLAN.width * 8  # bytes of a whole activation in float64
    shards, whole, off = (kept_bytes(kind) for kind in (KINDS["shards"], KINDS["whole"], None))

    # Two entrances a block, each of which keeps a part of its input or all of it.
    assert whole - shards == 2 * (one - one // 2)
    # Norms and residuals keep parts instead of wholes.
    assert shards < whole < off + 2 * one
    assert shards < off


class GptBlock(nn.Module):
    """The block that the published formula counts: GELU, an MLP of 4h, attention written out."""

    def __init__(self, tp, heads, width, sequence):
        super().__init__()
        self.heads = heads // tp.size
        options = {"sequence": sequence, "dtype": torch.bfloat16}
        third = Cut.even(width, tp.size)
        fused = Cut.joined(third, third, third)
        self.first = nn.LayerNorm(width, dtype=torch.bfloat16)
        self.qkv = ColumnParallelLinear(width, 3 * width, tp, cut=fused, **options)
        self.attention_drop = PlacedDropout(0.1, 0, "a", shards=[ShardedDim(1, tp.rank, tp.size)])
        self.out = RowParallelLinear(width, width, tp, **options)
        shards = [] if sequence is None else [ShardedDim(1, tp.rank, tp.size)]
        self.out_drop = PlacedDropout(0.1, 0, "o", shards=shards)
        self.second = nn.LayerNorm(width, dtype=torch.bfloat16)
        self.up = ColumnParallelLinear(width, 4 * width, tp, **options)
        self.down = RowParallelLinear(4 * width, width, tp, **options)
        self.down_drop = PlacedDropout(0.1, 0, "d", shards=shards)

    def forward(self, hidden):
        rows = self.qkv(self.first(hidden)).unflatten(-1, (3, self.heads, -1))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        weights = self.attention_drop(torch.softmax(q @ k.mT * 0.5, -1))
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        hidden = hidden + self.out_drop(self.out(mixed))
        middle = nn.functional.gelu(self.up(self.second(hidden)))
        return hidden + self.down_drop(self.down(middle))


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_gpt_block_keeps_the_bytes_of_the_published_formula(t):
    s, b, h, a = 8, 2, 16, 4
    activation = s * b * h
    scores = 5 * a * s / h
    expected = {
        "off": activation * (10 + 24 / t + scores / t),
        "shards": activation / t * (34 + scores),
        "whole": activation / t * (34 + scores) + 2 * 2 * activation * (1 - 1 / t),
    }

    def run(tp, kind):
        block = GptBlock(tp, a, h, KINDS.get(kind))
        saved = SavedBytes(block.parameters())
        length = s if kind == "off" else s // t
        with saved.watch():
            block(torch.ones(b, length, h, dtype=torch.bfloat16, requires_grad=True))
        # Not in the formula: mean and deviation of two norms, 16 or 32 bits a position each.
        return saved.total, 2 * 2 * b * length * 4

    for kind, formula in expected.items():
        for total, statistics in LocalWorld(t).run(run, kind):
            assert formula <= total <= formula + statistics


@both_kinds
def test_columns_that_share_an_entrance_gather_once_in_each_direction(kind):
    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        sequence = SequenceSharding(0, kind == "whole")
        options = {"sequence": sequence, "input_is_entered": True}
        layers = [ColumnParallelLinear(4, 4, recording, **options) for _ in range(3)]
        own = torch.ones(2, 4, requires_grad=True)
        hidden = enter_sequence(own, recording, sequence)
        outputs = [layer(hidden) for layer in layers]
        names = []
        # Twice through one graph: each backward gathers for itself.
        for _ in range(2):
            calls.clear()
            torch.stack(outputs).sum().backward(retain_graph=True)
            names.append([call.operation for call in calls])
        return names, [layer.weight.grad.tolist() for layer in layers]

    again = ["all_gather"] if kind == "shards" else []
    for names, gradients in LocalWorld(2).run(run):
        assert names == [[*again, "reduce_scatter"]] * 2
        assert gradients == [[[8.0] * 4] * 2] * 3


@both_kinds
def test_what_is_computed_from_a_gathered_input_is_kept_for_itself(kind):
    def run(tp):
        sequence = SequenceSharding(0, kind == "whole")
        layer = ColumnParallelLinear(2, 2, tp, sequence=sequence, input_is_entered=True)
        hidden = enter_sequence(torch.ones(1, 2, requires_grad=True), tp, sequence)
        layer(hidden * 3.0).sum().backward()
        return layer.weight.grad.tolist()

    assert LocalWorld(2).run(run) == [[[6.0, 6.0]]] * 2


@pytest.mark.parametrize("changed", ["part", "whole"])
def test_what_is_changed_in_place_after_it_was_gathered_is_kept_as_it_was_multiplied(changed):
    def run(tp):
        sequence = SequenceSharding(0)
        layer = ColumnParallelLinear(2, 2, tp, sequence=sequence, input_is_entered=True)
        part = torch.ones(1, 2, requires_grad=True) * 1.0
        hidden = enter_sequence(part, tp, sequence)
        {"part": part, "whole": hidden}[changed].mul_(5.0)
        layer(hidden).sum().backward()
        return layer.weight.grad.tolist()

    factor = 5.0 if changed == "whole" else 1.0
    assert LocalWorld(2).run(run) == [[[2 * factor, 2 * factor]]] * 2


@both_kinds
@pytest.mark.parametrize("enters", [False, True])
def test_recomputed_blocks_have_the_same_gradients(kind, enters):
    sequence = SequenceSharding(1, kind == "whole", length=3)
    whole = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2), dtype=PLAN.dtype)

    def run(tp, recomputed):
        block = ParallelBlock(PLAN, tp, sequence, enters)
        for index, parameter in enumerate(block.parameters()):
            generator = torch.Generator().manual_seed(index)
            nn.init.normal_(parameter, generator=generator)
        own = Cut.uneven(3, 2).take(whole, 1, tp.rank).clone().requires_grad_()
        first = checkpoint(block, own, use_reentrant=False) if recomputed else block(own)
        second = checkpoint(block, first, use_reentrant=False) if recomputed else block(first)
        second.square().sum().backward()
        return [own.grad, *(parameter.grad for parameter in block.parameters())]

    for plain, again in zip(
        LocalWorld(2).run(run, False), LocalWorld(2).run(run, True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_a_row_layers_bias_is_partial_only_where_it_is_added_to_positions():
    def run(tp):
        placed = {}
        for sequence in (None, SequenceSharding(0)):
            row = RowParallelLinear(4, 2, tp, bias=True, sequence=sequence)
            output = row(torch.ones(4, 2))
            output.sum().backward()
            reduce_gradients_(row, mesh_of(tp))
            placed[sequence is None] = row.bias.grad.tolist(), placements_of(row)["bias"]
        assert placed[False][1].gradient_on("tp") == Partial()
        assert placed[True][1].reduction_axes == ("dp", "cp")
        return placed[False][0], placed[True][0]

    assert LocalWorld(2).run(run) == [([4.0, 4.0], [4.0, 4.0])] * 2


def test_placing_a_norm_survives_copies_and_pickles_and_can_be_taken_back():
    norm = place_partial_(nn.LayerNorm(2))

    for other in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        other.bias = None
        assert list(placements_of(other)) == ["weight"]
        assert placements_of(other)["weight"].gradient_on("tp") == Partial()
    assert placements_of(norm)["bias"].gradient_on("tp") == Partial()
    with pytest.raises(ShardingError, match="LayerNorm places its parameters itself"):
        place_partial_(norm)
    assert placements_of(unplace_partial_(norm))["bias"].reduction_axes == ("dp", "cp")
    with pytest.raises(ShardingError, match="was not placed"):
        unplace_partial_(norm)


def test_a_part_of_another_size_is_refused_before_anything_is_sent():
    def run(tp):
        calls = []
        recording = RecordingCommunicator(tp, calls)
        sequence = SequenceSharding(0, length=3)
        for wrong in (torch.ones(4, 2), torch.ones(())):
            with pytest.raises(ShardingError, match=r"positions, got 4|the sequence is dim 0"):
                enter_sequence(wrong, recording, sequence)
        layer = ColumnParallelLinear(2, 2, recording, sequence=sequence)
        with pytest.raises(ShardingError, match="of the 3 positions, got 4"):
            layer(torch.ones(4, 2))
        return calls

    assert LocalWorld(2).run(run) == [[], []]
    with pytest.raises(ShardingError, match="counts from the front"):
        SequenceSharding(-1)
