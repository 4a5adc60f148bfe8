"""Algorithms, run: results are those of the communicator, traffic is that of the plans."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.collectives import algorithms
from trainwright.collectives.algorithms import Part, Payload, Plan, Step, chunk_bounds
from trainwright.collectives.errors import UsageError
from trainwright.collectives.local_world import LocalWorld
from trainwright.collectives.protocol import ReduceOp, Send

SIZES = range(1, 10)
OPS = [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64]

# Name: the function, and the plan that it follows.
ALL_REDUCES = {
    "direct": (algorithms.direct_all_reduce, algorithms.direct_all_reduce_plan),
    "master_worker": (
        algorithms.master_worker_all_reduce,
        algorithms.master_worker_all_reduce_plan,
    ),
    "ring": (algorithms.ring_all_reduce, algorithms.ring_all_reduce_plan),
    "bidirectional_ring": (
        algorithms.bidirectional_ring_all_reduce,
        algorithms.bidirectional_ring_all_reduce_plan,
    ),
    "tree": (
        partial(algorithms.tree_all_reduce, num_chunks=3),
        partial(algorithms.tree_all_reduce_plan, num_chunks=3),
    ),
    "double_tree": (
        partial(algorithms.double_tree_all_reduce, num_chunks=2),
        partial(algorithms.double_tree_all_reduce_plan, num_chunks=2),
    ),
    "halving_doubling": (
        algorithms.halving_doubling_all_reduce,
        algorithms.halving_doubling_all_reduce_plan,
    ),
}
REDUCE_SCATTERS = {
    "direct": (algorithms.direct_reduce_scatter, algorithms.direct_reduce_scatter_plan),
    "bidirectional_ring": (
        algorithms.bidirectional_ring_reduce_scatter,
        algorithms.bidirectional_ring_reduce_scatter_plan,
    ),
    "halving_doubling": (
        algorithms.halving_doubling_reduce_scatter,
        algorithms.halving_doubling_reduce_scatter_plan,
    ),
}
ALL_GATHERS = {
    "direct": (algorithms.direct_all_gather, algorithms.direct_all_gather_plan),
    "bidirectional_ring": (
        algorithms.bidirectional_ring_all_gather,
        algorithms.bidirectional_ring_all_gather_plan,
    ),
    "halving_doubling": (
        algorithms.halving_doubling_all_gather,
        algorithms.halving_doubling_all_gather_plan,
    ),
}


class Counter:
    """A passage that counts the messages of every exchange."""

    def __init__(self, comm):
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.exchanges = []
        self._comm = comm

    def exchange(self, messages):
        self.exchanges.append(list(messages))
        return self._comm.exchange(messages)

    def sends(self):
        return [m for messages in self.exchanges for m in messages if isinstance(m, Send)]

    def check(self, plan, numel, num_bytes):
        """Claim the traffic of the plan, for elements of so many bytes."""
        sends = self.sends()
        bounds = plan.bounds(numel)
        full = [p for step in plan.steps for p in step.sends if bounds[p.start] < bounds[p.stop]]
        assert [m.peer for m in sends] == [part.peer for part in full]
        assert sum(m.tensor.numel() for m in sends) == plan.num_sent(numel)
        assert sum(m.tensor.nbytes for m in sends) == plan.num_sent(numel) * num_bytes
        sending = [each for each in self.exchanges if any(isinstance(m, Send) for m in each)]
        assert len(sending) <= len(plan.steps)


def run(size, fn, *args):
    return LocalWorld(size, timeout_s=20.0).run(fn, *args)


def values_of(rank, numel, dtype):
    """Small whole numbers, whose sums and products are exact in every dtype in use."""
    signs = 1 - 2 * ((torch.arange(numel) + rank) % 3 == 0).long()
    return (signs * (1 + (torch.arange(numel) * 7 + rank * 5) % 3)).to(dtype)


def random_of(rank, numel, dtype):
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def fitting(op, dtype):
    if dtype.is_complex or (dtype is torch.int64 and op is ReduceOp.AVG):
        return ReduceOp.SUM
    return op


# ---------------------------------------------------------------- results and traffic


@pytest.mark.parametrize("size", SIZES)
def test_all_reduces_equal_the_communicators_own_and_send_what_they_plan(size):
    # Over all sizes, every operation and every dtype, in large tensors and in those with fewer
    # elements than chunks.
    cases = [
        (5040, OPS[size % 5], DTYPES[size % 5]),
        ((41, 4, 1, 0)[size % 4], OPS[(size + 2) % 5], DTYPES[(2 * size + 1) % 5]),
    ]

    def body(comm):
        for numel, op, dtype in cases:
            fit = fitting(op, dtype)
            own = values_of(comm.rank, numel, dtype)
            comm.all_reduce(own, fit).wait()
            for name, (reduce, make) in ALL_REDUCES.items():
                tensor, counter = values_of(comm.rank, numel, dtype), Counter(comm)
                reduce(counter, tensor, fit, reduce_dtype=dtype)
                assert torch.equal(tensor, own), name
                counter.check(make(comm.size, comm.rank), numel, dtype.itemsize)

    run(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_halves_of_all_reduces_equal_the_rings_and_send_what_they_plan(size):
    def body(comm):
        for numel, dtype in ((2520, torch.float32), (5, torch.int64)):
            bounds = chunk_bounds(numel, size)
            own = slice(bounds[comm.rank], bounds[comm.rank + 1])
            whole = values_of(comm.rank, numel, dtype)
            expected = torch.empty_like(whole[own])
            algorithms.ring_reduce_scatter(comm, expected, whole)
            everything = torch.empty_like(whole)
            algorithms.ring_all_gather(comm, everything, expected)
            for name, (scatter, make) in REDUCE_SCATTERS.items():
                source, counter = values_of(comm.rank, numel, dtype), Counter(comm)
                # The result may be written into the chunk that it came from.
                scatter(counter, source[own], source, reduce_dtype=dtype)
                assert torch.equal(source[own], expected), name
                source[own] = whole[own]
                assert torch.equal(source, whole), name
                counter.check(make(size, comm.rank), numel, dtype.itemsize)
            for name, (gather, make) in ALL_GATHERS.items():
                result, counter = torch.full_like(whole, -9), Counter(comm)
                gather(counter, result, expected)
                assert torch.equal(result, everything), name
                counter.check(make(size, comm.rank), numel, dtype.itemsize)

    run(size, body)


# Reductions and broadcasts, with ways to cut the tensor.
ROOTED = [
    (algorithms.direct_reduce, algorithms.direct_broadcast, [{}]),
    *(
        (reduce, broadcast, [{"num_chunks": k} for k in (3, None)])
        for reduce, broadcast in (
            (algorithms.ring_reduce, algorithms.ring_broadcast),
            (algorithms.tree_reduce, algorithms.tree_broadcast),
            (algorithms.double_tree_reduce, algorithms.double_tree_broadcast),
        )
    ),
]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_reductions_go_to_any_root_and_broadcasts_come_from_it(size):
    def body(comm):
        for root, (reduce, broadcast, cuts) in itertools.product({0, size - 1}, ROOTED):
            own = values_of(comm.rank, 10, torch.bfloat16)
            comm.reduce(own, root, ReduceOp.AVG).wait()
            for cut in cuts:
                tensor = values_of(comm.rank, 10, torch.bfloat16)
                reduce(comm, tensor, root, ReduceOp.AVG, **cut)
                assert torch.equal(tensor, own), reduce
                # A column, which only strides tell from its neighbour.
                base = values_of(comm.rank, 14, torch.float32).view(7, 2)
                neighbour = base[:, 1].clone()
                broadcast(comm, base[:, 0], root, **cut)
                from_root = values_of(root, 14, torch.float32).view(7, 2)[:, 0]
                assert torch.equal(base[:, 0], from_root), broadcast
                assert torch.equal(base[:, 1], neighbour), broadcast

    run(size, body)


@pytest.mark.parametrize(("ranks_per_node", "num_nodes"), [(1, 3), (3, 1), (2, 2), (3, 2), (2, 4)])
def test_a_hierarchy_of_communicators_reduces_over_all(ranks_per_node, num_nodes):
    d, m = ranks_per_node, num_nodes

    def body(comm):
        node, across = algorithms.split_by_nodes(comm, d)
        assert (node.size, across.size) == (d, m)
        sent = []
        for numel, dtype in ((d * m * 12, torch.float32), (7, torch.bfloat16)):
            own = values_of(comm.rank, numel, dtype)
            comm.all_reduce(own, ReduceOp.AVG).wait()
            tensor, within, outside = (
                values_of(comm.rank, numel, dtype),
                *map(Counter, (node, across)),
            )
            algorithms.hierarchical_all_reduce(within, outside, tensor, ReduceOp.AVG)
            assert torch.equal(tensor, own)
            bounds = chunk_bounds(numel, comm.size)
            kept = torch.empty(bounds[comm.rank + 1] - bounds[comm.rank], dtype=dtype)
            source = values_of(comm.rank, numel, dtype)
            algorithms.hierarchical_reduce_scatter(node, across, kept, source, ReduceOp.AVG)
            assert torch.equal(kept, own[bounds[comm.rank] : bounds[comm.rank + 1]])
            everything = torch.empty_like(own)
            algorithms.hierarchical_all_gather(node, across, everything, kept)
            assert torch.equal(everything, own)
            sent.append([sum(m.tensor.numel() for m in c.sends()) for c in (within, outside)])
        numel = d * m * 12
        assert sent[0] == [2 * (d - 1) * numel // d, 2 * (m - 1) * numel // m // d]

    run(d * m, body)


@given(
    size=st.sampled_from(SIZES),
    shape=st.lists(st.integers(0, 6), max_size=3),
    op=st.sampled_from(OPS),
    name=st.sampled_from(sorted(ALL_REDUCES)),
)
@example(size=5, shape=[], op=ReduceOp.AVG, name="halving_doubling")
@example(size=3, shape=[4, 0], op=ReduceOp.SUM, name="double_tree")
def test_transposed_tensors_of_any_shape_are_combined_by_value(size, shape, op, name):
    reduce, _ = ALL_REDUCES[name]

    def body(comm):
        numel = torch.Size(shape).numel()
        tensor = (
            values_of(comm.rank, numel, torch.float32)
            .view(shape)
            .permute(tuple(reversed(range(len(shape)))))
        )
        expected = tensor.clone()
        comm.all_reduce(expected, op).wait()
        reduce(comm, tensor, op)
        assert torch.equal(tensor, expected)

    run(size, body)


class Watched:
    """A passage that looks whether what is sent is still there when the sending is over."""

    def __init__(self, comm):
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self._comm = comm

    def exchange(self, messages):
        sent = [(m.tensor, m.tensor.clone()) for m in messages if isinstance(m, Send)]
        work = self._comm.exchange(messages)

        class Watching:
            def wait(self):
                work.wait()
                assert all(torch.equal(now, before) for now, before in sent)

        return Watching()


def test_what_is_sent_is_not_combined_with_before_it_has_been_sent():
    def body(comm):
        for reduce in (algorithms.direct_all_reduce, algorithms.direct_reduce_scatter):
            tensor = torch.full((6,), 1.0 + comm.rank)
            kept = tensor[2 * comm.rank :][:2]
            reduce(Watched(comm), *([tensor] if "all" in reduce.__name__ else [kept, tensor]))
            assert set(kept.tolist()) == {6.0}

    run(3, body)


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("size", [2, 6])
def test_every_rank_gets_the_same_bits_close_to_the_exact_sum(size):
    def body(comm):
        results = {}
        for name, (reduce, _) in ALL_REDUCES.items():
            results[name] = random_of(comm.rank, 101, torch.float64)
            reduce(comm, results[name])
        return results

    ranks = run(size, body)

    parts = [random_of(rank, 101, torch.float64) for rank in range(size)]
    exact = torch.stack(parts).sum(0)
    # Each of size - 1 additions rounds once, relative to at most the sum of magnitudes.
    bound = size * torch.finfo(torch.float64).eps * torch.stack(parts).abs().sum(0)
    for name in ALL_REDUCES:
        assert all(torch.equal(results[name], ranks[0][name]) for results in ranks), name
        assert ((ranks[0][name] - exact).abs() <= bound).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
def test_algorithms_in_rank_order_have_the_bits_of_the_communicator(dtype, op):
    def body(comm):
        own = random_of(comm.rank, 60, torch.float32).to(dtype)
        comm.all_reduce(own, op).wait()
        for reduce in (algorithms.direct_all_reduce, algorithms.master_worker_all_reduce):
            tensor = random_of(comm.rank, 60, torch.float32).to(dtype)
            reduce(comm, tensor, op, deterministic=True)
            assert torch.equal(tensor, own)
        kept = torch.empty(12, dtype=dtype)
        source = random_of(comm.rank, 60, torch.float32).to(dtype)
        algorithms.direct_reduce_scatter(comm, kept, source, op, deterministic=True)
        assert torch.equal(kept, own[12 * comm.rank : 12 * (comm.rank + 1)])

    run(5, body)


def test_bfloat16_sums_are_exact_for_every_order_of_the_ranks():
    orders = torch.tensor(list(itertools.permutations([256.0, 1.0, 1.0, -256.0])))

    def body(comm):
        for numel, (name, (reduce, _)) in itertools.product((1, 7), ALL_REDUCES.items()):
            tensor = orders[:, comm.rank].bfloat16().repeat(numel)
            reduce(comm, tensor)
            assert tensor.tolist() == [2.0] * (24 * numel), name
        for name, (scatter, _) in REDUCE_SCATTERS.items():
            kept = torch.empty(6, dtype=torch.bfloat16)
            scatter(comm, kept, orders[:, comm.rank].bfloat16())
            assert kept.tolist() == [2.0] * 6, name

    run(4, body)


def test_means_in_float16_neither_overflow_nor_vanish():
    def body(comm):
        for name, (reduce, _) in ALL_REDUCES.items():
            tensor = torch.tensor([30000.0, 2.0**-24], dtype=torch.float16)
            reduce(comm, tensor, ReduceOp.AVG)
            assert tensor.tolist() == [30000.0, 2.0**-24], name

    run(4, body)


def test_what_a_rank_contributes_travels_as_it_is_and_partial_sums_travel_wide():
    def body(comm):
        numbers = {}
        for name, (reduce, _) in ALL_REDUCES.items():
            counter = Counter(comm)
            reduce(counter, torch.ones(24, dtype=torch.bfloat16))
            numbers[name] = sum(m.tensor.nbytes for m in counter.sends())
        return numbers

    ranks = run(4, body)

    assert [r["ring"] for r in ranks] == [6 * 2 + 12 * 4 + 18 * 2] * 4
    assert [r["halving_doubling"] for r in ranks] == [12 * 2 + 6 * 4 + 18 * 2] * 4
    assert [r["direct"] for r in ranks] == [3 * 24 * 2] * 4
    assert [r["master_worker"] for r in ranks] == [3 * 24 * 2, *([24 * 2] * 3)]


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "refused",
    [
        partial(algorithms.ring_all_reduce),
        partial(algorithms.bidirectional_ring_all_reduce),
        partial(algorithms.tree_all_reduce),
        partial(algorithms.double_tree_all_reduce),
        partial(algorithms.halving_doubling_all_reduce),
        partial(algorithms.tree_reduce, root=0),
        partial(algorithms.double_tree_reduce, root=0),
        partial(algorithms.ring_reduce, root=0),
    ],
)
def test_algorithms_of_another_order_refuse_to_be_deterministic(refused):
    def body(comm):
        counter = Counter(comm)
        with pytest.raises(UsageError, match="deterministic=True asks for sums in rank order"):
            refused(counter, torch.ones(4), deterministic=True)
        # Whole numbers have the same bits in any order.
        refused(counter, torch.ones(4, dtype=torch.int64), deterministic=True)

    run(2, body)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda comm: algorithms.all_reduce_by(
                Plan("ring", 0, 3, (), kept=(0, 1)), comm, torch.ones(2)
            ),
            r"ring_all_reduce: the plan is that of rank 0 of 3, this is rank . of 2",
        ),
        (
            lambda comm: algorithms.tree_all_reduce(comm, torch.ones(2), num_chunks=0),
            "num_chunks=0 must be at least 1",
        ),
        (lambda comm: algorithms.tree_broadcast(comm, torch.ones(2), 2), "root: rank=2"),
        (
            lambda comm: algorithms.tree_broadcast(comm, torch.ones(1).expand(2), 1 - comm.rank),
            "share memory",
        ),
        (
            lambda comm: algorithms.double_tree_all_reduce(comm, [1.0]),
            "expected a tensor, got list",
        ),
        (
            lambda comm: algorithms.halving_doubling_all_gather(comm, torch.ones(8), torch.ones(5)),
            "input of rank . must hold the 4 elements of its chunk of 2, got 5",
        ),
        (lambda comm: algorithms.split_by_nodes(comm, 3), "ranks_per_node=3 must divide the 2"),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused_before_any_message(act, message):
    def body(comm):
        counter = Counter(comm)
        with pytest.raises(UsageError, match=message):
            act(counter)
        assert counter.exchanges == []

    run(2, body)


def test_a_plan_that_joins_what_it_combined_apart_is_refused():
    come = Part(1, 0, 1, Payload.CONTRIBUTION)
    leave = Part(1, 0, 2, Payload.PARTIAL)
    plan = Plan("joining", 0, 2, (Step((), (come,)), Step((leave,), ())), blocks=2)

    def body(comm):
        if comm.rank == 1:
            comm.send(torch.ones(2), 0).wait()
        else:
            algorithms.reduce_by(plan, comm, torch.ones(4))

    with pytest.raises(UsageError, match=r"chunks 0\.\.1 were combined and now 0\.\.2 would be"):
        run(2, body)
