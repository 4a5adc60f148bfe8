"""Attention shared along the sequence equals the plain attention of one process."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import LocalWorld, Recorded
from trainwright.sharding import ShardingError
from trainwright.sharding.context import (
    ContextLayout,
    Documents,
    RingPlan,
    gathered_attention,
    hybrid_attention,
    hybrid_communicators,
    ring_attention,
    ulysses_attention,
)
from trainwright.sharding.context.ring import ring_of_plan
from trainwright.sharding.context.testing import AttentionProblem, attention_problems

KINDS = st.sampled_from(["zigzag", "contiguous"])


def in_a_grid(q, k, v, *, layout, comm, ulysses, **options):
    grid = hybrid_communicators(comm, ulysses)
    return hybrid_attention(q, k, v, layout=layout, comm=grid, **options)


def in_pieces(q, k, v, *, layout, comm, documents, causal, pieces):
    known = None if documents is None else Documents.of(documents)
    plan = RingPlan.of(
        layout.ranges, layout.ranges, comm.rank, causal=causal, documents=known, pieces=pieces
    )
    return ring_of_plan(q, k, v, plan, comm, None)


def assert_same(problem, way, layout):
    expected = problem.expected()
    found = problem.found(way, layout)
    for one, other in zip(found, expected, strict=True):
        # Sums of at most 40 terms of size 10 in float64; NaN is equal to nothing.
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@given(
    problem=attention_problems(),
    ranks=st.integers(1, 8),
    kind=KINDS,
    pieces=st.one_of(st.none(), st.integers(2, 4)),
)
@settings(max_examples=12)
def test_ring_attention_is_the_attention_of_one_process(problem, ranks, kind, pieces):
    layout = ContextLayout(kind, problem.length, ranks)

    way = ring_attention if pieces is None else functools.partial(in_pieces, pieces=pieces)

    assert_same(problem, way, layout)


@pytest.mark.parametrize("way", [gathered_attention, ulysses_attention])
@given(problem=attention_problems(), ranks=st.integers(1, 8), kind=KINDS)
@settings(max_examples=8)
def test_gathered_keys_and_shared_heads_give_the_attention_of_one_process(
    way, problem, ranks, kind
):
    layout = ContextLayout(kind, problem.length, ranks)

    assert_same(problem, way, layout)


@given(
    problem=attention_problems(),
    grid=st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4)]),
    kind=KINDS,
)
@settings(max_examples=8)
def test_a_grid_of_rings_and_shared_heads_gives_the_attention_of_one_process(problem, grid, kind):
    rows, columns = grid
    layout = ContextLayout(kind, problem.length, rows * columns)

    assert_same(problem, functools.partial(in_a_grid, ulysses=columns), layout)


def problem_of(length, documents=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn((1, 2, length, 8), generator=generator).to(dtype) for _ in range(4)]
    return AttentionProblem(tuple(tensors[:3]), tensors[3], documents, True)


@pytest.mark.parametrize("way", [ring_attention, gathered_attention, ulysses_attention])
@pytest.mark.parametrize(
    ("dtype", "epsilon"),
    [(torch.float32, 2**-23), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)],
)
def test_low_precision_is_merged_in_float32(way, dtype, epsilon):
    problem = problem_of(48, dtype=dtype)

    found = problem.found(way, ContextLayout("zigzag", 48, 4))

    for one, other in zip(found, problem.expected(), strict=True):
        assert one.dtype == dtype
        # A result of one block is off by the rounding of inputs, weights and of itself, and in
        # float32 by that of a sum of 48 terms; there are at most 5 blocks, none above the largest.
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 10 * epsilon


def test_gradients_do_not_grow_with_the_ranks():
    problem = problem_of(24)
    norms = {}

    for ranks in (1, 2, 4, 8):
        for way in (ring_attention, gathered_attention, ulysses_attention):
            found = problem.found(way, ContextLayout("zigzag", 24, ranks))
            norms[ranks, way] = torch.stack([grad.norm() for grad in found[1:]])

    for norm in norms.values():
        torch.testing.assert_close(norm, norms[1, ring_attention])


def sent_bytes(comm, problem, layout):
    recorded = Recorded(comm)
    problem.on_rank(recorded, ring_attention, layout)
    return recorded.traffic.total.bytes_sent


def test_keys_that_nobody_sees_do_not_travel():
    layout = ContextLayout("contiguous", 32, 4)
    apart = problem_of(32, torch.arange(4).repeat_interleave(8)[None])
    across = problem_of(32, torch.tensor([0] * 10 + [1] * 22)[None])

    none = LocalWorld(4).run(sent_bytes, apart, layout)
    some = LocalWorld(4).run(sent_bytes, across, layout)
    all_of_it = LocalWorld(4).run(sent_bytes, problem_of(32), layout)

    assert none == [0] * 4
    # Keys and values of 2 heads of 8 float64, forth and again, and gradients back.
    position = 2 * 2 * 8 * 8
    # Rank 0 gives its keys to rank 1 (2 queries of document 0), rank 1 six to ranks 2 and 3.
    assert some[0] == 2 * 8 * position
    assert sum(some) < sum(all_of_it)


@pytest.mark.parametrize("way", [ring_attention, gathered_attention, ulysses_attention])
def test_a_sequence_without_positions_is_attended_to(way):
    problem = problem_of(0)

    found = problem.found(way, ContextLayout("zigzag", 0, 3))

    assert [tensor.shape for tensor in found] == [(1, 2, 0, 8)] * 4


def test_microbatches_have_their_own_documents():
    ids = torch.tensor([[0] * 5 + [1] * 3, [0] * 2 + [1] * 6, [-1] * 8, [0] * 8])
    documents = Documents.of(ids)

    for start, stop in ((0, 1), (1, 3), (3, 4)):
        assert documents.select(start, stop) == Documents.of(ids[start:stop])


def test_a_ring_and_an_all_reduce_on_other_communicators_do_not_meet():
    problem = problem_of(16)
    layout = ContextLayout("zigzag", 16, 2)

    def run(world):
        ring = world.split(world.rank // 2)
        data = world.split(world.rank % 2)
        gradient = torch.full((64,), float(world.rank), dtype=torch.float64)
        reduced = data.all_reduce(gradient)
        found = problem.on_rank(ring, ring_attention, layout)
        reduced.wait()
        assert gradient.tolist() == [2.0 * (world.rank % 2) + 2.0] * 64
        return found

    parts = LocalWorld(4).run(run)

    for found, want in zip(zip(*parts[:2], strict=True), problem.expected(), strict=True):
        torch.testing.assert_close(layout.join(found, 2), want, atol=1e-12, rtol=1e-12)


@given(
    ids=st.lists(st.integers(-1, 3), min_size=1, max_size=30),
    ranks=st.integers(1, 6),
    kind=KINDS,
    causal=st.booleans(),
    pieces=st.integers(1, 3),
)
def test_what_one_rank_gives_another_takes_and_each_pair_is_computed_once(
    ids, ranks, kind, causal, pieces
):
    layout = ContextLayout(kind, len(ids), ranks)
    ranges, documents = layout.ranges, Documents.of(torch.tensor([ids]))

    plans = [
        RingPlan.of(ranges, ranges, rank, causal=causal, documents=documents, pieces=pieces)
        for rank in range(ranks)
    ]

    counted = torch.zeros(len(ids), len(ids), dtype=torch.int64)
    for rank, plan in enumerate(plans):
        own = layout.positions(rank)
        for number, step in enumerate(plan.steps):
            assert plans[step.owner].steps[number].given == step.taken
            first = 0 if step.taken is None else step.taken[0]
            asked = layout.positions(step.owner)[first:]
            for span in step.spans:
                block = torch.ones(span.queries[1] - span.queries[0], span.keys[1] - span.keys[0])
                rows, keys = own[slice(*span.queries)], asked[slice(*span.keys)]
                counted[rows[:, None], keys] += (block.tril() if span.causal else block).long()
    problem = AttentionProblem((torch.zeros(1, 1, len(ids), 1),) * 3, torch.zeros(1), None, causal)
    problem = AttentionProblem(problem.inputs, problem.upstream, torch.tensor([ids]), causal)
    assert torch.equal(counted, problem.visible()[0, 0].long())


@pytest.mark.parametrize(("kind", "work"), [("zigzag", [68, 68]), ("contiguous", [36, 100])])
def test_zigzag_gives_ranks_equal_causal_work(kind, work):
    ranges = ContextLayout(kind, 16, 2).ranges

    plans = [RingPlan.of(ranges, ranges, rank, causal=True) for rank in range(2)]

    assert [plan.area for plan in plans] == work


def tensors(length, heads=2, dtype=torch.float32):
    return [torch.zeros(1, heads, length, 4, dtype=dtype)] * 3


@pytest.mark.parametrize("way", [ring_attention, gathered_attention, ulysses_attention])
def test_arguments_that_do_not_fit_are_refused_before_anything_moves(way):
    def refuse(comm, match, layout, length, documents=None, **kinds):
        with pytest.raises(ShardingError, match=match):
            way(*tensors(length, **kinds), layout=layout, comm=comm, documents=documents)

    def run(comm):
        layout = ContextLayout("zigzag", 8, 2)
        refuse(comm, "make it with size=2", ContextLayout("zigzag", 8, 4), 2)
        refuse(comm, "holds 4 of 8 positions", layout, 5)
        refuse(comm, "before sequences are split", layout, 4, torch.zeros(1, 4, dtype=torch.int64))
        refuse(comm, "those of this micro-batch", layout, 4, torch.zeros(2, 8, dtype=torch.int64))
        refuse(comm, "documents are integers", layout, 4, torch.zeros(1, 8))
        refuse(comm, "floating-point dtype", layout, 4, dtype=torch.int64)

    LocalWorld(2).run(run)


def test_a_size_that_does_not_divide_the_ranks_makes_no_grid():
    def run(comm):
        with pytest.raises(ShardingError, match="must divide the 4 ranks"):
            hybrid_communicators(comm, 3)

    LocalWorld(4).run(run)
