"""Plans of algorithms, checked as data: what they compute, in how many steps, with what traffic."""

import math
from functools import partial

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives import algorithms
from trainwright.collectives.algorithms import (
    Part,
    Payload,
    Plan,
    Step,
    tree_height,
    tree_node,
    twin_node,
    verify_plans,
)
from trainwright.collectives.errors import UsageError

SIZES = range(1, 10)
# Divisible by all that tensors are cut into below.
K = 5040 * 4

REDUCE_SCATTERS = {
    "direct": algorithms.direct_reduce_scatter_plan,
    "ring": algorithms.ring_reduce_scatter_plan,
    "bidirectional_ring": algorithms.bidirectional_ring_reduce_scatter_plan,
    "halving_doubling": algorithms.halving_doubling_reduce_scatter_plan,
}
ALL_GATHERS = {
    "direct": algorithms.direct_all_gather_plan,
    "ring": algorithms.ring_all_gather_plan,
    "bidirectional_ring": algorithms.bidirectional_ring_all_gather_plan,
    "halving_doubling": algorithms.halving_doubling_all_gather_plan,
}
ALL_REDUCES = {
    "direct": algorithms.direct_all_reduce_plan,
    "master_worker": partial(algorithms.master_worker_all_reduce_plan, master=0),
    "ring": algorithms.ring_all_reduce_plan,
    "bidirectional_ring": algorithms.bidirectional_ring_all_reduce_plan,
    "tree": partial(algorithms.tree_all_reduce_plan, num_chunks=1),
    "tree in chunks": partial(algorithms.tree_all_reduce_plan, num_chunks=3),
    "double_tree": partial(algorithms.double_tree_all_reduce_plan, num_chunks=1),
    "double_tree in chunks": partial(algorithms.double_tree_all_reduce_plan, num_chunks=4),
    "halving_doubling": algorithms.halving_doubling_all_reduce_plan,
}


def plans_of(make, size):
    return [make(size, rank) for rank in range(size)]


def counts_of(plans):
    """Steps, messages and elements of each rank."""
    assert len({len(plan.steps) for plan in plans}) == 1
    messages = [plan.num_messages for plan in plans]
    return len(plans[0].steps), messages, [plan.num_sent(K) for plan in plans]


# ---------------------------------------------------------------- what they compute


@pytest.mark.parametrize("size", [*SIZES, 16, 23])
def test_every_contribution_is_counted_once_in_every_result(size):
    for table in (REDUCE_SCATTERS, ALL_GATHERS, ALL_REDUCES):
        for make in table.values():
            verify_plans(plans_of(make, size))


# Name: reduction, broadcast, and their steps beside the number of chunks minus one.
ROOTED = {
    "direct": (
        lambda n, r, root, k: algorithms.direct_reduce_plan(n, r, root),
        lambda n, r, root, k: algorithms.direct_broadcast_plan(n, r, root),
        lambda n: 1,
    ),
    "ring": (algorithms.ring_reduce_plan, algorithms.ring_broadcast_plan, lambda n: n - 1),
    "tree": (algorithms.tree_reduce_plan, algorithms.tree_broadcast_plan, tree_height),
    "double_tree": (
        algorithms.double_tree_reduce_plan,
        algorithms.double_tree_broadcast_plan,
        lambda n: tree_height(n - 1) + 1,
    ),
}


@pytest.mark.parametrize("name", ROOTED)
@given(size=st.integers(1, 12), root=st.integers(0, 11), k=st.integers(1, 4))
def test_any_rank_can_be_the_root(name, size, root, k):
    reduce, broadcast, height = ROOTED[name]
    root, k = root % size, 1 if name == "direct" else k

    up = [reduce(size, rank, root, k) for rank in range(size)]
    down = [broadcast(size, rank, root, k) for rank in range(size)]

    verify_plans(up)
    verify_plans(down)
    chunks = (0, up[0].num_chunks)
    assert [plan.rank for plan in up if plan.kept == chunks] == [root]
    assert [plan.rank for plan in down if plan.given == chunks] == [root]
    steps = height(size) + k - 1 if size > 1 else 0
    assert len(up[0].steps) == len(down[0].steps) == steps
    numel = 120
    assert [plan.num_sent(numel) for plan in up] == [numel * (r != root) for r in range(size)]
    assert [plan.num_received(numel) for plan in down] == [numel * (r != root) for r in range(size)]
    if name in ("ring", "double_tree"):
        assert all(plan.num_sent(numel) <= numel for plan in down)
        assert all(plan.num_received(numel) <= numel for plan in up)


@pytest.mark.parametrize("master", range(4))
def test_any_rank_can_be_the_master(master):
    make = partial(algorithms.master_worker_all_reduce_plan, master=master)

    plans = plans_of(make, 4)

    verify_plans(plans)
    assert plans[master].num_sent(K) == 3 * K


def sent_within_and_across(plan, ranks_per_node):
    """How many elements a rank sends in its node, and to others."""
    bounds = plan.bounds(K)
    sent = [0, 0]
    for step in plan.steps:
        for part in step.sends:
            is_far = part.peer // ranks_per_node != plan.rank // ranks_per_node
            sent[is_far] += bounds[part.stop] - bounds[part.start]
    return sent


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_a_hierarchy_sends_a_nodes_share_across(d, m):
    """Over m nodes of d ranks."""
    makes = [
        algorithms.hierarchical_reduce_scatter_plan,
        algorithms.hierarchical_all_gather_plan,
        algorithms.hierarchical_all_reduce_plan,
    ]

    for make, passes in zip(makes, (1, 1, 2), strict=True):
        plans = plans_of(partial(make, ranks_per_node=d), d * m)

        verify_plans(plans)
        steps, messages, _ = counts_of(plans)
        assert steps == passes * (d - 1 + m - 1)
        assert set(messages) == {steps if passes == 2 else (d - 1) * m + m - 1}
        for plan in plans:
            sent = [passes * (d - 1) * K // d, passes * (m - 1) * K // m // d]
            assert sent_within_and_across(plan, d) == sent


# ---------------------------------------------------------------- what they cost


@pytest.mark.parametrize("n", SIZES)
def test_steps_messages_and_elements_are_those_of_the_formulas(n):
    counted = {name: counts_of(plans_of(make, n)) for name, make in ALL_REDUCES.items()}

    ring = 2 * (n - 1) * K // n
    assert counted["ring"] == (2 * (n - 1), [2 * (n - 1)] * n, [ring] * n)
    assert counted["bidirectional_ring"] == (2 * (n - 1), [4 * (n - 1)] * n, [ring] * n)
    assert counted["direct"] == (min(n - 1, 1), [n - 1] * n, [(n - 1) * K] * n)
    one_each = [1] * (n - 1)
    steps = 2 if n > 1 else 0
    assert counted["master_worker"] == (steps, [n - 1, *one_each], [(n - 1) * K, *([K] * (n - 1))])
    for name, trees, k in (
        ("tree", 1, 1),
        ("tree in chunks", 1, 3),
        ("double_tree", 2, 1),
        ("double_tree in chunks", 2, 4),
    ):
        steps, messages, elements = counted[name]
        assert steps == (2 * int(math.log2(n)) + k - 1 if n > 1 else 0)
        assert sum(messages) == 2 * (n - 1) * k * trees
        assert sum(elements) == 2 * (n - 1) * K
    steps, messages, elements = counted["halving_doubling"]
    assert steps == 2 * math.ceil(math.log2(n))
    assert sum(elements) == 2 * (n - 1) * K
    if n & (n - 1) == 0:
        assert messages == [steps] * n
        assert elements == [ring] * n


@pytest.mark.parametrize("n", SIZES)
def test_halves_of_an_all_reduce_send_a_chunk_for_each_other_rank(n):
    for name, make in REDUCE_SCATTERS.items():
        steps, messages, elements = counts_of(plans_of(make, n))
        assert elements == [(n - 1) * K // n] * n, name
        if name == "halving_doubling":
            assert steps == math.ceil(math.log2(n))
            assert max(messages) <= steps
        else:
            assert steps == (min(n - 1, 1) if name == "direct" else n - 1)
            assert messages == [(n - 1) * (2 if name == "bidirectional_ring" else 1)] * n
    for name, make in ALL_GATHERS.items():
        plans = plans_of(make, n)
        assert [plan.num_received(K) for plan in plans] == [(n - 1) * K // n] * n, name
        assert sum(plan.num_sent(K) for plan in plans) == (n - 1) * K


@pytest.mark.parametrize("n", SIZES)
def test_a_bidirectional_ring_sends_each_neighbour_as_much(n):
    for plan in plans_of(algorithms.bidirectional_ring_all_reduce_plan, n):
        bounds = plan.bounds(K)
        sent = dict.fromkeys(((plan.rank + 1) % n, (plan.rank - 1) % n), 0)
        for step in plan.steps:
            for part in step.sends:
                sent[part.peer] += bounds[part.stop] - bounds[part.start]
        assert set(sent.values()) == {2 * (n - 1) * K // n // len(sent)}


@pytest.mark.parametrize("n", range(2, 40))
def test_uneven_halves_burden_no_rank_twice(n):
    plans = plans_of(algorithms.halving_doubling_reduce_scatter_plan, n)

    for plan in plans:
        assert sum(len(step.receives) > 1 for step in plan.steps) <= 1
        # Each level may add one chunk, and one of them half of all.
        assert plan.num_received(n) <= n - 1 + n // 2 + len(plan.steps)
        assert plan.most_messages_a_step <= 1


# ---------------------------------------------------------------- trees


@pytest.mark.parametrize("n", [*range(1, 34), 100, 255, 256, 257])
def test_an_inner_rank_of_one_tree_is_a_leaf_of_the_other(n):
    for rank in range(n):
        assert not (tree_node(n, rank).children and twin_node(n, rank).children)


@pytest.mark.parametrize("node", [tree_node, twin_node])
@pytest.mark.parametrize("n", range(1, 34))
def test_a_tree_has_one_root_and_is_no_higher_than_it_must(node, n):
    nodes = [node(n, rank) for rank in range(n)]

    assert sum(place.parent is None for place in nodes) == 1
    assert max(place.depth for place in nodes) == tree_height(n) == int(math.log2(n))
    for rank, place in enumerate(nodes):
        assert len(place.children) <= 2
        for child in place.children:
            assert nodes[child].parent == rank
            assert nodes[child].depth == place.depth + 1
    assert sum(len(place.children) for place in nodes) == n - 1


@given(n=st.integers(2, 300), k=st.integers(1, 20))
def test_two_trees_take_few_steps_and_no_rank_sends_more_than_twice_the_tensor(n, k):
    numel = 2 * k * 6
    ranks = {0, 1, n // 2, n - 2, n - 1}

    for rank in ranks:
        plan = algorithms.double_tree_all_reduce_plan(n, rank, k)

        assert len(plan.steps) <= 2 * math.ceil(math.log2(n)) + k
        assert plan.num_sent(numel) <= 2 * numel
        assert plan.num_received(numel) <= 2 * numel
        assert plan.most_messages_a_step <= 4


def test_a_rank_of_a_large_world_plans_only_its_own_messages():
    plan = algorithms.double_tree_all_reduce_plan(16384, 5000, 8)

    assert len(plan.steps) == 2 * 14 + 8 - 1
    assert len(list(plan.parts())) <= 2 * 8 * 4


# ---------------------------------------------------------------- what is refused

HALF = Payload.CONTRIBUTION


def change(plans, rank, number, **parts):
    """Replace the messages of one step of one rank."""
    steps = list(plans[rank].steps)
    steps[number] = attrs.evolve(steps[number], **parts)
    changed = list(plans)
    changed[rank] = attrs.evolve(plans[rank], steps=tuple(steps))
    return changed


def test_a_message_without_its_other_side_is_found():
    plans = plans_of(algorithms.ring_all_reduce_plan, 3)

    with pytest.raises(UsageError, match=r"step 1: from rank 0 to rank 1: .* not what is received"):
        verify_plans(change(plans, 1, 1, receives=()))


def test_a_contribution_that_comes_twice_is_found():
    meet = Step((Part(1, 0, 1, HALF),), (Part(1, 0, 1, HALF),))
    back = Step((Part(0, 0, 1, HALF),), (Part(0, 0, 1, HALF),))
    plans = [
        Plan("twice", 0, 2, (meet, attrs.evolve(meet, sends=())), kept=(0, 1)),
        Plan("twice", 1, 2, (back, attrs.evolve(back, receives=())), kept=(0, 1)),
    ]

    with pytest.raises(UsageError, match=r"sent as a contribution, but it holds .*\[0, 1\]"):
        verify_plans(plans)
    again = [Part(peer, 0, 1, HALF) for peer in (1, 1)]
    twice = [
        Plan("twice", 0, 2, (Step((), tuple(again)),), kept=(0, 1)),
        Plan("twice", 1, 2, (Step(tuple(attrs.evolve(p, peer=0) for p in again), ()),)),
    ]
    with pytest.raises(UsageError, match=r"\[1\] contribute arrives where it cannot be added"):
        verify_plans(twice)


def test_a_result_that_is_none_yet_is_found():
    plans = [
        Plan("early", 0, 2, (Step((Part(1, 0, 1, Payload.RESULT),), ()),)),
        Plan("early", 1, 2, (Step((), (Part(0, 0, 1, Payload.RESULT),)),), kept=(0, 1)),
    ]

    with pytest.raises(UsageError, match="rank 0, chunk 0: passed on as a result with only"):
        verify_plans(plans)


def test_what_was_given_away_is_not_used_again():
    send, receive = (Part(1, 0, 1, Payload.PARTIAL),), (Part(0, 0, 1, Payload.PARTIAL),)
    plans = [
        Plan("again", 0, 2, (Step(send, ()), Step(send, ()))),
        Plan("again", 1, 2, (Step((), receive), Step((), receive))),
    ]

    with pytest.raises(UsageError, match="step 1: rank 0, chunk 0: sent on although"):
        verify_plans(plans)


def test_a_promised_result_that_never_comes_is_found():
    plans = plans_of(algorithms.ring_reduce_scatter_plan, 3)
    plans[2] = attrs.evolve(plans[2], kept=(0, 3))

    with pytest.raises(UsageError, match="rank 2 of 3 ends without the result of chunk 0"):
        verify_plans(plans)


def test_messages_between_two_ranks_keep_their_order():
    plans = plans_of(algorithms.bidirectional_ring_all_reduce_plan, 2)

    swapped = plans[0].steps[0].sends[::-1]
    with pytest.raises(UsageError, match="from rank 0 to rank 1"):
        verify_plans(change(plans, 0, 0, sends=swapped))


def test_partial_results_are_not_in_rank_order():
    plans = plans_of(algorithms.ring_all_reduce_plan, 3)

    with pytest.raises(UsageError, match="partial results are not in rank order"):
        verify_plans([attrs.evolve(plan, in_rank_order=True) for plan in plans])


def test_plans_of_different_worlds_do_not_belong_together():
    with pytest.raises(UsageError, match="plan 1 of 2 belongs to another world"):
        verify_plans([algorithms.ring_all_reduce_plan(2, 0), algorithms.ring_all_reduce_plan(3, 1)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: algorithms.ring_all_reduce_plan(3, 3), r"rank=3 is not one of 3"),
        (lambda: algorithms.halving_doubling_all_reduce_plan(0, 0), r"rank=0 is not one of 0"),
        (lambda: algorithms.tree_all_reduce_plan(3, -1), r"rank=-1 is not one of 3"),
        (lambda: algorithms.tree_broadcast_plan(3, 0, 5), r"root: rank=5 is not one of 3"),
        (
            lambda: algorithms.master_worker_all_reduce_plan(3, 0, 7),
            r"root: rank=7",
        ),
        (lambda: algorithms.ring_reduce_plan(3, 0, 5), r"root: rank=5 is not one of 3"),
        (lambda: algorithms.double_tree_reduce_plan(3, 4, 0), r"rank=4 is not one of 3"),
        (lambda: algorithms.hierarchical_all_reduce_plan(6, 0, 4), r"ranks_per_node=4 must divide"),
        (lambda: Plan("short", 0, 2, (Step((Part(1, 0, 2, HALF),)),)), r"chunks 0\.\.2 of rank 0"),
        (lambda: Plan("far", 0, 2, (Step((Part(2, 0, 1, HALF),)),)), r"rank=2 is not one of 2"),
    ],
)
def test_ranks_and_chunks_that_do_not_exist_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
