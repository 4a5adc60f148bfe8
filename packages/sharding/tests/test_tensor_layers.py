"""Tensor-parallel layers compute the plain layers: outputs, all gradients, traffic."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld, SingleCommunicator, differentiable, random
from trainwright.sharding import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardingError,
    VocabParallelEmbedding,
    check_indices,
    local_heads,
)
from trainwright.sharding.testing import (
    check_computes_the_plain_module,
    check_pieces_tile_the_parameters,
    shard_sizes,
)

# What is a choice is tried in full; what is a size or a value is drawn.
every_size = pytest.mark.parametrize("size", [1, 2, 3])
a_few = settings(max_examples=4)
DTYPES = st.sampled_from([torch.float64, torch.float32])


def drawn(module, generator):
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module


class Counting:
    """A communicator that notes the names of the collectives it passes on."""

    def __init__(self, comm):
        self.comm = comm
        self.calls = []

    def __getattr__(self, name):
        value = getattr(self.comm, name)
        if name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
            self.calls.append(name)
        return value


@every_size
@pytest.mark.parametrize("gather", [False, True])
@a_few
@given(data=st.data(), dtype=DTYPES, bias=st.booleans())
def test_column_parallel_linear_is_the_plain_linear(data, size, dtype, bias, gather):
    width, out = data.draw(st.integers(1, 6)), data.draw(shard_sizes(size))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    plain = drawn(nn.Linear(width, out, bias=bias, dtype=dtype), generator)
    input = torch.randn(2, 3, width, generator=generator, dtype=dtype)

    def build(tp):
        return ColumnParallelLinear(width, out, tp, bias=bias, gather_output=gather, dtype=dtype)

    check_pieces_tile_the_parameters(build, size)
    output_dim = None if gather else -1
    check_computes_the_plain_module(build, plain, input, size, output_dim=output_dim)


@every_size
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@a_few
@given(data=st.data(), dtype=DTYPES)
def test_row_parallel_linear_is_the_plain_linear(data, size, dtype, bias, parallel):
    width, out = data.draw(shard_sizes(size)), data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    plain = drawn(nn.Linear(width, out, bias=bias, dtype=dtype), generator)
    input = torch.randn(4, width, generator=generator, dtype=dtype)

    def build(tp):
        return RowParallelLinear(width, out, tp, bias=bias, input_is_parallel=parallel, dtype=dtype)

    check_pieces_tile_the_parameters(build, size)
    input_dim = -1 if parallel else None
    check_computes_the_plain_module(build, plain, input, size, input_dim=input_dim)


@every_size
@a_few
@given(data=st.data(), dtype=DTYPES)
def test_vocab_parallel_embedding_is_the_plain_embedding(data, size, dtype):
    vocabulary, width = data.draw(shard_sizes(size)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    plain = drawn(nn.Embedding(vocabulary, width, dtype=dtype), generator)
    indices = torch.randint(vocabulary, (3, 5), generator=generator)

    def build(tp):
        return VocabParallelEmbedding(vocabulary, width, tp, dtype=dtype)

    check_pieces_tile_the_parameters(build, size)
    check_computes_the_plain_module(build, plain, indices, size)


@every_size
@a_few
@given(data=st.data())
def test_a_column_and_a_row_layer_are_an_mlp_of_one_all_reduce_each_way(data, size):
    width, middle = data.draw(st.integers(1, 4)), data.draw(shard_sizes(size))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    plain = drawn(
        nn.Sequential(nn.Linear(width, middle), nn.GELU(), nn.Linear(middle, width)).double(),
        generator,
    )
    input = torch.randn(3, width, generator=generator, dtype=torch.float64)

    def build(tp):
        options = {"bias": True, "dtype": torch.float64}
        return nn.Sequential(
            ColumnParallelLinear(width, middle, tp, **options),
            nn.GELU(),
            RowParallelLinear(middle, width, tp, **options),
        )

    def traffic(tp):
        counting = Counting(tp)
        mlp = build(counting)
        output = mlp(input.clone().requires_grad_())
        forward = list(counting.calls)
        output.sum().backward()
        return forward, counting.calls[len(forward) :]

    check_computes_the_plain_module(build, plain, input, size)
    expected = ["all_reduce"] if size > 1 else []
    assert LocalWorld(size).run(traffic) == [(expected, expected)] * size


def test_several_column_layers_can_share_one_input_reduction():
    input = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))

    def gradient(tp, entered):
        counting = Counting(tp)
        layers = [ColumnParallelLinear(4, 4, counting, input_is_entered=entered) for _ in range(3)]
        for index, layer in enumerate(layers):
            layer.reset_parameters(random.Key(0, f"layers.{index}"), 1.0)
        own = input.clone().requires_grad_()
        hidden = differentiable.replicate_to_partial(own, counting) if entered else own
        torch.stack([layer(hidden) for layer in layers]).sum().backward()
        return own.grad, counting.calls

    together = LocalWorld(2).run(gradient, True)
    apart = LocalWorld(2).run(gradient, False)

    assert [calls for _, calls in together] == [["all_reduce"]] * 2
    assert [calls for _, calls in apart] == [["all_reduce"] * 3] * 2
    torch.testing.assert_close(together[0][0], apart[0][0])


def test_a_weight_shared_by_heads_on_several_ranks_has_a_partial_gradient():
    # SHD-05: head values 3 and 7 under one weight, upstream 1; the sum of the ranks is 10.
    def run(tp):
        weight = nn.Parameter(torch.ones(()))
        (weight * (3.0, 7.0)[tp.rank]).backward()
        tp.all_reduce(weight.grad).wait()
        return weight.grad.item()

    assert LocalWorld(2).run(run) == [10.0, 10.0]


@pytest.mark.parametrize("tp", [1, 2])
def test_heads_are_shared_out_evenly(tp):
    assert local_heads(8, 2, tp) == (8 // tp, 2 // tp)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((8, 2, 4), "num_kv_heads=2 is less than tp=4"),
        ((6, 4, 2), "num_heads=6 must be a multiple of num_kv_heads=4"),
        ((12, 6, 4), "num_kv_heads is 6, which tp=4 does not divide.*nearest tp 3 or 6"),
        ((0, 1, 1), "num_heads=0"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_with_their_numbers(heads, message):
    # SHD-13: before any process starts, not by a reshape in the forward.
    with pytest.raises(ShardingError, match=message):
        local_heads(*heads)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda tp: ColumnParallelLinear(4, 7, tp),
            "out_features is 7, which tp=4 does not divide.*sizes that work are 4 or 8",
        ),
        (lambda tp: RowParallelLinear(6, 4, tp), "in_features is 6.*nearest tp 3 or 6"),
        (lambda tp: VocabParallelEmbedding(255, 4, tp), "num_embeddings is 255.*252 or 256"),
    ],
)
def test_sizes_that_the_ranks_cannot_share_are_refused_on_every_rank(build, message):
    def run(tp):
        with pytest.raises(ShardingError, match=message):
            build(tp)

    LocalWorld(4).run(run)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("bad", [-1, 8, 100])
def test_an_index_outside_the_vocabulary_is_refused_on_every_rank(size, bad):
    def run(tp):
        embedding = VocabParallelEmbedding(8, 2, tp)
        with pytest.raises(ShardingError, match=rf"in 0\.\.7, got {bad} at \(0, 1\)"):
            embedding(torch.tensor([[0, bad]]))

    LocalWorld(size).run(run)


def test_indices_must_be_integers():
    for wrong in (torch.zeros(2), torch.zeros(2, dtype=torch.bool)):
        with pytest.raises(ShardingError, match="label must be integers"):
            check_indices(wrong, 4, "label")


def test_empty_inputs_pass_through():
    def run(tp):
        column = ColumnParallelLinear(4, 4, tp)(torch.zeros(0, 4))
        row = RowParallelLinear(4, 4, tp, bias=True)(torch.zeros(0, 4 // tp.size))
        found = VocabParallelEmbedding(4, 3, tp)(torch.zeros(0, dtype=torch.int64))
        return column.shape, row.shape, found.shape

    assert LocalWorld(2).run(run) == [((0, 2), (0, 4), (0, 3))] * 2


def test_a_forward_is_one_linear_product():
    calls = []

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    tp = SingleCommunicator()
    column = ColumnParallelLinear(4, 4, tp, bias=True)
    row = RowParallelLinear(4, 4, tp, bias=True)
    input = torch.ones(2, 4)
    with Noting():
        row(column(input))

    assert calls == [F.linear, F.linear]


def test_layers_say_their_whole_size_and_their_place():
    tp = SingleCommunicator()

    assert "in_features=4, out_features=8, bias=True, tp=0 of 1" in repr(
        ColumnParallelLinear(4, 8, tp, bias=True)
    )
    assert "in_features=4, out_features=8, bias=False" in repr(RowParallelLinear(4, 8, tp))
    assert "16, 8, tp=0 of 1" in repr(VocabParallelEmbedding(16, 8, tp))
