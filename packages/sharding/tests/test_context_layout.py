"""Layouts of a sequence over ranks, and documents in it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld
from trainwright.sharding import ShardingError
from trainwright.sharding.context import ContextLayout, Documents, change_layout

KINDS = st.sampled_from(["zigzag", "contiguous"])


@given(kind=KINDS, length=st.integers(0, 50), size=st.integers(1, 9))
def test_each_position_lies_on_one_rank_and_ranks_differ_by_one(kind, length, size):
    layout = ContextLayout(kind, length, size)
    whole = torch.arange(length)

    parts = [layout.split(whole, 0, rank) for rank in range(size)]

    assert torch.equal(layout.join(parts, -1), whole)
    assert [len(part) for part in parts] == list(layout.sizes)
    assert max(layout.sizes) - min(layout.sizes) <= 1
    for rank, part in enumerate(parts):
        assert torch.equal(part, layout.positions(rank))
        assert torch.equal(part, part.sort().values)


def test_zigzag_positions_follow_the_tokens_and_time_order_is_one_exchange_away():
    zigzag, contiguous = ContextLayout("zigzag", 16, 2), ContextLayout("contiguous", 16, 2)

    def run(comm):
        mine = zigzag.positions(comm.rank)
        ordered = change_layout(mine, 0, comm, source=zigzag, target=contiguous)
        back = change_layout(ordered, 0, comm, source=contiguous, target=zigzag)
        return mine.tolist(), ordered.tolist(), back.tolist()

    first, second = LocalWorld(2).run(run)

    assert first == ([*range(4), *range(12, 16)], [*range(8)], first[0])
    assert second == ([*range(4, 12)], [*range(8, 16)], second[0])


@given(length=st.integers(1, 30), size=st.integers(1, 6), dim=st.sampled_from([0, 1, -1]))
def test_change_of_layout_keeps_values_and_carries_gradients_back(length, size, dim):
    source, target = (
        ContextLayout("zigzag", length, size),
        ContextLayout("contiguous", length, size),
    )
    whole = torch.arange(float(2 * length)).view(2, length).movedim(1, dim)
    upstream = whole.cos()

    def run(comm):
        part = source.split(whole, dim, comm.rank).clone().requires_grad_()
        found = change_layout(part, dim, comm, source=source, target=target)
        (grad,) = torch.autograd.grad(found, part, target.split(upstream, dim, comm.rank))
        assert torch.equal(found, target.split(whole, dim, comm.rank))
        assert torch.equal(grad, source.split(upstream, dim, comm.rank))

    LocalWorld(size).run(run)


def test_lengths_that_do_not_divide_are_cut_as_evenly_as_can_be():
    assert ContextLayout("contiguous", 2999, 4).sizes == (750, 750, 750, 749)
    assert ContextLayout("zigzag", 2999, 4).sizes == (749, 750, 750, 750)
    assert ContextLayout("zigzag", 15, 2).ranges == (((0, 4), (12, 15)), ((4, 12),))
    assert ContextLayout("zigzag", 3, 4).sizes == (1, 1, 1, 0)


def test_layouts_that_cannot_be_are_refused():
    with pytest.raises(ShardingError, match="zigzag, contiguous, got 'striped'"):
        ContextLayout("striped", 8, 2)
    with pytest.raises(ShardingError, match="size >= 1"):
        ContextLayout("zigzag", 8, 0)
    with pytest.raises(ShardingError, match="cut's size 8"):
        ContextLayout("zigzag", 8, 2).split(torch.zeros(7), 0, 1)
    with pytest.raises(ShardingError, match=r"rank must be in 0\.\.1"):
        ContextLayout("zigzag", 8, 2).positions(-1)

    def run(comm):
        layouts = {"source": ContextLayout("zigzag", 8, 2), "target": ContextLayout("zigzag", 9, 2)}
        with pytest.raises(ShardingError, match="one sequence"):
            change_layout(torch.zeros(4), 0, comm, **layouts)
        same = {"source": layouts["source"], "target": ContextLayout("contiguous", 8, 2)}
        with pytest.raises(ShardingError, match="holds 4 positions"):
            change_layout(torch.zeros(3), 0, comm, **same)

    LocalWorld(2).run(run)


def test_documents_are_the_same_by_numbers_and_by_boundaries():
    ids = torch.tensor([[0, 0, 0, 1, 1, -1], [-1, 0, 1, 1, 1, 1]])

    found = Documents.of(ids)

    assert found == Documents.from_boundaries([[0, 3, 5], [1, 2, 6]], 6)
    assert found.positions().tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]]
    assert found.select(1, 2) == Documents.of(ids[1:])
    assert Documents.of(torch.tensor([[4, 4, 2, 4]])).positions().tolist() == [[0, 1, 0, 2]]
    with pytest.raises(ShardingError, match="boundaries of sequence 0"):
        Documents.from_boundaries([[0, 9]], 6)
    with pytest.raises(ShardingError, match=r"integers \[B, S\]"):
        Documents.of(ids[0])
