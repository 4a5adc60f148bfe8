"""A cut is data: every index on its rank, in order, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import Box, ShardSpec
from trainwright.sharding import ParameterPlacement, ShardingError
from trainwright.sharding.tensor.cuts import Cut

few = settings(max_examples=15, deadline=None)


@st.composite
def partitions(draw, ranks=None):
    ranks = draw(st.integers(1, 4)) if ranks is None else ranks
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    return Cut.joined(*(draw(blocks(ranks, kind)) for kind in kinds))


@st.composite
def blocks(draw, ranks, kind):
    if kind == 0:
        return Cut.even(draw(st.integers(0, 3)) * ranks, ranks)
    if kind == 1:
        return Cut.uneven(draw(st.integers(0, 9)), ranks)
    return Cut.of_sizes(draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)))


@given(size=st.integers(0, 20), ranks=st.integers(1, 7))
def test_the_parts_of_a_balanced_cut_differ_by_one_at_most(size, ranks):
    cut = Cut.balanced(size, ranks)

    assert [index for rank in range(ranks) for index in cut.indices(rank)] == list(range(size))
    assert sorted(cut.sizes, reverse=True) == list(cut.sizes)
    assert max(cut.sizes) - min(cut.sizes) <= 1


@few
@given(size=st.integers(0, 12), ranks=st.integers(1, 5))
def test_an_uneven_cut_is_that_of_torch_chunk(size, ranks):
    cut = Cut.uneven(size, ranks)

    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)] if size else []
    chunks += [[]] * (ranks - len(chunks))
    assert [list(cut.indices(rank)) for rank in range(ranks)] == chunks
    assert cut.is_partition


@few
@given(cut=partitions(), dim=st.integers(0, 2))
def test_joining_what_the_ranks_take_is_the_identity(cut, dim):
    shape = [2, 3, 2]
    shape[dim] = cut.size
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    parts = [cut.take(whole, dim, rank) for rank in range(cut.num_ranks)]

    for rank, part in enumerate(parts):
        assert torch.equal(part, whole.index_select(dim, torch.tensor(cut.indices(rank)).int()))
    assert [part.shape[dim] for part in parts] == list(cut.sizes)
    assert torch.equal(cut.join(parts, dim), whole)
    assert torch.equal(cut.join(parts, dim - 3), whole)


@few
@given(cut=partitions(), dim=st.integers(0, 2))
def test_the_boxes_of_a_rank_are_its_local_tensor_element_by_element(cut, dim):
    shape = [2, 3, 2]
    shape[dim] = cut.size
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    for rank in range(cut.num_ranks):
        placement = ParameterPlacement.cut(shape, dim, cut, rank=rank)
        local = ShardSpec.of_boxes("w", shape, placement.boxes).extract(whole)
        assert torch.equal(local.view(-1), cut.take(whole, dim, rank).reshape(-1))


def test_a_fused_gate_and_up_keeps_a_part_of_each_on_every_rank():
    cut = Cut.joined(Cut.even(4, 2), Cut.even(4, 2))

    assert cut.ranges == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert cut.boxes((8, 3), 0, 1) == (Box((2, 0), (4, 3)), Box((6, 0), (8, 3)))


def test_cuts_of_the_same_indices_are_equal_and_one_rank_holds_one_range():
    assert Cut.joined(Cut.even(4, 1), Cut.even(6, 1)) == Cut.even(10, 1) == Cut.whole(10, 1)
    assert Cut(4, [[(0, 1), (1, 3), (3, 3)], [(3, 4)]]) == Cut.of_sizes([3, 1])
    assert Cut.even(4, 2).scaled(3) == Cut.even(12, 2)


def test_an_index_may_lie_on_several_ranks_but_a_parameter_is_not_cut_so():
    cut = Cut(4, [[(0, 2)], [(0, 2)], [(2, 4)]])

    whole = torch.arange(4)
    assert torch.equal(cut.join([cut.take(whole, 0, r) for r in range(3)], 0), whole)
    assert not cut.is_partition
    assert not cut.is_whole
    with pytest.raises(ShardingError, match="each index lies on one rank"):
        ParameterPlacement.cut((4,), 0, cut, rank=0)
    with pytest.raises(ShardingError, match="every rank holds whole"):
        ParameterPlacement.cut((4,), 0, Cut.whole(4, 2), rank=0)


def test_a_rank_of_an_uneven_cut_may_hold_nothing():
    placement = ParameterPlacement.cut((2, 3), 0, Cut.uneven(2, 4), rank=3)

    assert placement.boxes == ()
    assert Cut.uneven(2, 4).take(torch.ones(2, 3), 0, 3).shape == (0, 3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Cut.even(7, 2), "size is 7, which tp=2 does not divide.*6 or 8"),
        (lambda: Cut(3, []), "at least one rank"),
        (lambda: Cut(3, [[(0, 4)]]), r"rank 0 holds 0\.\.4, which is no range of 0\.\.3"),
        (lambda: Cut(3, [[(0, 2), (1, 3)]]), r"0\.\.2 and 1\.\.3, which overlap"),
        (lambda: Cut.joined(Cut.even(4, 2), Cut.even(4, 1)), r"blocks over \[2, 1\]"),
        (lambda: Cut.joined(), "blocks over"),
        (lambda: Cut.even(4, 2).take(torch.ones(3), 0, 0), r"\(3,\) must have the cut's size 4"),
        (lambda: Cut.even(4, 2).join([torch.ones(2), torch.ones(1)], 0), r"parts with \[2, 1\]"),
        (lambda: Cut(3, [[(0, 1)]]).join([torch.ones(1)], 0), "index 1 of 3 lies on no rank"),
    ],
)
def test_a_cut_that_cannot_be_is_refused_with_its_numbers(build, message):
    with pytest.raises(ShardingError, match=message):
        build()
