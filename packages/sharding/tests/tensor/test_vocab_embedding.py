"""A table cut in any way, with a padding row or a cut sequence, is the plain embedding."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trainwright.collectives import LocalWorld, SingleCommunicator, random
from trainwright.sharding import ShardingError, VocabParallelEmbedding
from trainwright.sharding.data.testing import RecordingCommunicator
from trainwright.sharding.tensor.cuts import Cut
from trainwright.sharding.tensor.sequence import SequenceSharding
from trainwright.sharding.testing import (
    check_computes_the_plain_module,
    check_pieces_tile_the_parameters,
)


def cuts_of(size, ranks):
    return st.sampled_from(
        [
            Cut.uneven(size, ranks),
            Cut.of_sizes([*[0] * (ranks - 1), size]),
            Cut.joined(Cut.uneven(2, ranks), Cut.uneven(size - 2, ranks)),
            Cut(size, [[(2, size), (0, 2)], *[[]] * (ranks - 1)]),
        ]
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@settings(max_examples=6)
@given(data=st.data(), padding=st.sampled_from([None, 0, 3, -1]))
def test_any_cut_of_the_table_with_any_padding_row_is_the_plain_table(ranks, data, padding):
    size = data.draw(st.integers(4, 9))
    cut = data.draw(cuts_of(size, ranks))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    plain = nn.Embedding(size, 3, padding_idx=padding, dtype=torch.float64)
    nn.init.normal_(plain.weight, generator=generator)
    indices = torch.randint(size, (2, 5), generator=generator)
    indices[0] = torch.arange(5) % size

    def build(tp):
        return VocabParallelEmbedding(
            size, 3, tp, cut=cut, padding_idx=padding, dtype=torch.float64
        )

    check_pieces_tile_the_parameters(build, ranks)
    check_computes_the_plain_module(build, plain, indices, ranks)


@pytest.mark.parametrize("length", [4, 5, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_under_sequence_parallelism_each_rank_has_its_positions_and_all_gradients(ranks, length):
    generator = torch.Generator().manual_seed(length)
    table = torch.randn(7, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(7, (2, length), generator=generator)
    upstream = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    rows = Cut.uneven(7, ranks)
    positions = Cut.uneven(length, ranks)

    def run(tp):
        calls = []
        module = VocabParallelEmbedding(
            7,
            3,
            RecordingCommunicator(tp, calls),
            cut=rows,
            sequence=SequenceSharding(1),
            dtype=torch.float64,
        )
        with torch.no_grad():
            module.weight.copy_(rows.take(table.detach(), 0, tp.rank))
        output = module(indices)
        output.backward(positions.take(upstream, 1, tp.rank))
        return output.detach(), module.weight.grad, [call.operation for call in calls]

    results = LocalWorld(ranks).run(run)
    expected = F.embedding(indices, table)
    expected.backward(upstream)
    torch.testing.assert_close(positions.join([r[0] for r in results], 1), expected.detach())
    torch.testing.assert_close(rows.join([r[1] for r in results], 0), table.grad)
    traffic = ["reduce_scatter", "all_gather"] if ranks > 1 else []
    assert [r[2] for r in results] == [traffic] * ranks


def test_the_padding_row_is_drawn_as_zeros_and_the_others_as_in_any_layout():
    def run(tp):
        module = VocabParallelEmbedding(6, 2, tp, cut=Cut.uneven(6, tp.size), padding_idx=4)
        module.reset_parameters(random.Key(0, "tokens"), 1.0)
        return module.weight.detach()

    whole = LocalWorld(1).run(run)[0]

    assert torch.equal(torch.cat(LocalWorld(4).run(run)), whole)
    assert whole[4].tolist() == [0.0, 0.0]
    assert whole[[0, 1, 2, 3, 5]].count_nonzero() == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut": Cut.uneven(7, 2)}, "the cut is of 7 rows, num_embeddings=8"),
        ({"cut": Cut.uneven(8, 4)}, "cut over 4 ranks, tp=2"),
        ({"cut": Cut.whole(8, 2)}, "exactly one rank"),
        ({"padding_idx": 8}, r"padding_idx must be in -8\.\.7, got 8"),
        ({"padding_idx": -9}, "padding_idx must be"),
    ],
)
def test_a_table_that_cannot_be_is_refused_on_every_rank(options, message):
    def run(tp):
        with pytest.raises(ShardingError, match=message):
            VocabParallelEmbedding(8, 2, tp, **options)

    LocalWorld(2).run(run)


def test_a_table_says_its_padding_row():
    module = VocabParallelEmbedding(8, 2, SingleCommunicator(), padding_idx=-1)

    assert "8, 2, padding_idx=7, tp=0 of 1" in repr(module)
