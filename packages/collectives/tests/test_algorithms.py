import functools
import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives.algorithms import (
    chunk_bounds,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.protocol import ReduceOp, Send

OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]
SIZES = range(1, 10)


class CountingPassage:
    """A communicator of nothing but `exchange`, which counts what this rank sends."""

    def __init__(self, comm):
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.sent = []
        self.peers = set()
        self.bytes = 0
        self.steps = 0
        self._comm = comm

    def exchange(self, messages):
        sends = [message for message in messages if isinstance(message, Send)]
        self.peers |= {(type(message), message.peer) for message in messages}
        self.sent += [message.tensor.numel() for message in sends]
        self.bytes += sum(message.tensor.nbytes for message in sends)
        self.steps += bool(sends)
        return self._comm.exchange(messages)


def run(size, fn, *args):
    """Run on ranks that wait for a send until it has been received."""
    return LocalWorld(size, timeout_s=20.0, buffered_sends=False).run(fn, *args)


def values_of(rank, numel, dtype):
    """Small whole numbers, whose sums and products are exact in every dtype in use."""
    signs = 1 - 2 * ((torch.arange(numel) + rank) % 3 == 0).long()
    return (signs * (1 + (torch.arange(numel) * 7 + rank * 5) % 3)).to(dtype)


def combined(size, numel, op, dtype):
    parts = torch.stack([values_of(rank, numel, torch.float64) for rank in range(size)])
    results = {
        ReduceOp.SUM: parts.sum(0),
        ReduceOp.AVG: parts.mean(0),
        ReduceOp.MAX: parts.amax(0),
        ReduceOp.MIN: parts.amin(0),
        ReduceOp.PRODUCT: parts.prod(0),
    }
    return results[op].to(dtype)


# ---------------------------------------------------------------- results

rings = given(
    size=st.sampled_from(SIZES),
    numel=st.integers(0, 40),
    op=st.sampled_from(OPS),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64]),
)


@rings
@example(size=9, numel=4, op=ReduceOp.AVG, dtype=torch.float32)
@example(size=1, numel=5, op=ReduceOp.AVG, dtype=torch.bfloat16)
def test_ring_all_reduce_combines_the_contributions_of_all_ranks(size, numel, op, dtype):
    op = ReduceOp.SUM if op is ReduceOp.AVG and dtype is torch.int64 else op

    def body(comm):
        tensor = values_of(comm.rank, numel, dtype)
        ring_all_reduce(comm, tensor, op)
        return tensor

    results = run(size, body)

    expected = combined(size, numel, op, dtype)
    assert all(torch.equal(result, expected) for result in results)


@rings
def test_ring_reduce_scatter_leaves_each_rank_its_chunk(size, numel, op, dtype):
    op = ReduceOp.SUM if op is ReduceOp.AVG and dtype is torch.int64 else op
    bounds = chunk_bounds(numel, size)

    def body(comm):
        source = values_of(comm.rank, numel, dtype)
        kept = torch.empty(bounds[comm.rank + 1] - bounds[comm.rank], dtype=dtype)
        ring_reduce_scatter(comm, kept, source, op)
        unchanged = torch.equal(source, values_of(comm.rank, numel, dtype))
        part = source[bounds[comm.rank] : bounds[comm.rank + 1]]
        ring_reduce_scatter(comm, part, source, op)
        return kept, part, unchanged

    results = run(size, body)

    expected = combined(size, numel, op, dtype)
    assert torch.equal(torch.cat([kept for kept, _, _ in results]), expected)
    assert torch.equal(torch.cat([part for _, part, _ in results]), expected)
    assert all(unchanged for _, _, unchanged in results)


@rings
def test_ring_all_gather_joins_the_chunks_of_all_ranks(size, numel, op, dtype):
    whole = torch.arange(numel).to(dtype)
    bounds = chunk_bounds(numel, size)

    def body(comm):
        result = torch.full_like(whole, -1)
        own = slice(bounds[comm.rank], bounds[comm.rank + 1])
        apart = whole[own].clone()
        ring_all_gather(comm, result, apart)
        again = torch.full_like(whole, -1)
        again[own] = whole[own]
        ring_all_gather(comm, again, again[own])
        return result, again

    results = run(size, body)

    assert all(torch.equal(result, whole) for pair in results for result in pair)


@pytest.mark.parametrize("size", [2, 3])
def test_rings_equal_the_communicators_own_collectives_where_the_ranks_divide_the_rows(size):
    def body(comm):
        source = torch.randn(
            size * 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank)
        )
        rows = torch.empty(2, 3, dtype=torch.float64)
        theirs = torch.empty_like(rows)
        ring_reduce_scatter(comm, rows, source)
        comm.reduce_scatter(theirs, source).wait()
        whole, all_theirs = torch.empty_like(source), torch.empty_like(source)
        ring_all_gather(comm, whole, rows)
        comm.all_gather(all_theirs, rows).wait()
        return rows, theirs, whole, all_theirs

    for rows, theirs, whole, all_theirs in run(size, body):
        # Two or three terms in another order.
        torch.testing.assert_close(rows, theirs, rtol=1e-14, atol=1e-14)
        assert torch.equal(whole, all_theirs)


def test_a_strided_tensor_is_reduced_by_its_own_elements_only():
    def body(comm):
        base = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (comm.rank + 1)
        ring_all_reduce(comm, base[:, 0])
        return base

    first, second = run(2, body)

    assert first.tolist() == [[3.0, 2.0], [9.0, 4.0]]
    assert second.tolist() == [[3.0, 4.0], [9.0, 8.0]]


def test_every_rank_gets_the_same_bits_of_an_inexact_sum():
    def body(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        tensor = torch.randn(101, generator=generator)
        ring_all_reduce(comm, tensor)
        return tensor

    results = run(5, body)

    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("order", list(itertools.permutations([256.0, 1.0, 1.0, -256.0]))[::5])
def test_bfloat16_contributions_are_added_in_float32_whatever_their_order(order):
    def body(comm):
        tensor = torch.full((7,), order[comm.rank], dtype=torch.bfloat16)
        ring_all_reduce(comm, tensor)
        return tensor

    assert all(result.tolist() == [2.0] * 7 for result in run(4, body))


def test_a_mean_in_float16_neither_overflows_nor_vanishes():
    def body(comm):
        tensor = torch.tensor([30000.0, 2.0**-24], dtype=torch.float16)
        ring_all_reduce(comm, tensor, ReduceOp.AVG)
        return tensor

    assert all(result.tolist() == [30000.0, 2.0**-24] for result in run(4, body))


def test_integer_sums_are_exact_beyond_what_float64_holds():
    def body(comm):
        tensor = torch.tensor([2**53 + 1 if comm.rank == 0 else 0])
        ring_all_reduce(comm, tensor)
        return tensor.item()

    assert run(3, body) == [2**53 + 1] * 3


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numel", [0, 1, 40, 5040])
def test_traffic_is_that_of_the_formula(size, numel):
    lengths = [stop - start for start, stop in itertools.pairwise(chunk_bounds(numel, size))]

    def body(comm):
        counts = []
        tensor = torch.zeros(numel)
        kept = torch.zeros(lengths[comm.rank])
        for ring in (
            functools.partial(ring_all_reduce, tensor=tensor),
            functools.partial(ring_reduce_scatter, output=kept, input=tensor),
            functools.partial(ring_all_gather, output=tensor, input=kept),
        ):
            passage = CountingPassage(comm)
            ring(passage)
            counts.append(passage)
        return counts

    for rank, (reduced, scattered, gathered) in enumerate(run(size, body)):
        own, following = lengths[rank], lengths[(rank + 1) % size]
        assert sum(scattered.sent) == numel - own
        assert sum(gathered.sent) == numel - following
        assert sum(reduced.sent) == 2 * numel - own - following
        if numel % size == 0:
            assert sum(reduced.sent) * size == 2 * (size - 1) * numel
        if numel >= size:
            assert (scattered.steps, gathered.steps) == (size - 1, size - 1)
            assert reduced.steps == 2 * (size - 1)
        assert reduced.bytes == 4 * sum(reduced.sent)
        assert {peer for kind, peer in reduced.peers if kind is Send} <= {(rank + 1) % size}
        assert all(sent > 0 for sent in reduced.sent)


def test_low_precision_travels_wide_while_it_is_summed_and_narrow_once_it_is():
    def body(comm):
        passage = CountingPassage(comm)
        ring_all_reduce(passage, torch.ones(8, dtype=torch.bfloat16))
        narrow = CountingPassage(comm)
        ring_all_reduce(narrow, torch.ones(8, dtype=torch.bfloat16), reduce_dtype=torch.bfloat16)
        return passage.bytes, narrow.bytes

    # What leaves first is the sender's own, as it is.
    assert run(4, body) == [(2 * 2 + 4 * 4 + 6 * 2, 6 * 2 + 6 * 2)] * 4


@given(numel=st.integers(0, 10**6), size=st.integers(1, 64))
def test_chunks_cover_the_elements_and_differ_by_at_most_one(numel, size):
    bounds = chunk_bounds(numel, size)

    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1], len(lengths)) == (0, numel, size)
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) == math.ceil(numel / size)
    assert min(lengths) == numel // size


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        (
            lambda comm: ring_reduce_scatter(comm, torch.zeros(5), torch.zeros(7)),
            "output of rank . must hold the [34] elements of its chunk of 2, got 5",
        ),
        (
            lambda comm: ring_all_gather(comm, torch.zeros(8), torch.zeros(3)),
            "input of rank . must hold the 4 elements",
        ),
        (
            lambda comm: ring_all_gather(comm, torch.zeros(4, 2).T, torch.zeros(4)),
            "output is written in order",
        ),
        (
            lambda comm: ring_reduce_scatter(comm, torch.zeros(4, 2)[:, 0], torch.zeros(8)),
            "output is written in order",
        ),
        (
            lambda comm: ring_all_reduce(comm, torch.zeros(3).long(), ReduceOp.AVG),
            "AVG of",
        ),
        (
            lambda comm: ring_all_gather(comm, torch.zeros(8), torch.zeros(4).double()),
            "alike",
        ),
        (lambda comm: ring_all_reduce(comm, torch.zeros(1).expand(3)), "share memory"),
    ],
)
def test_what_a_ring_cannot_do_is_refused_before_any_message(ring, message):
    def body(comm):
        passage = CountingPassage(comm)
        with pytest.raises(UsageError, match=message):
            ring(passage)
        return passage.steps

    assert run(2, body) == [0, 0]
