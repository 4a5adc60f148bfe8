import functools
import itertools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.collectives import algorithms as plans
from trainwright.collectives.cost import (
    algorithms_for,
    best,
    bus_bandwidth,
    busbw_factor,
    cost,
    costs,
    format_bytes,
    format_costs,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.phases import best_chunks
from trainwright.collectives.topology import Link, Topology, preset

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all")
KIB, MIB, GIB = 2**10, 2**20, 2**30
FAST, SLOW = Link(2.0, 4.0), Link(7.0, 1.0)
PAIRS = [(name, each) for name in COLLECTIVES for each in algorithms_for(name)]


def one_node(ranks, **options):
    return Topology(1, ranks, FAST, FAST, **options)


# ---------------------------------------------------------------- the plans, step by step

PLANS = {
    ("all_reduce", "ring"): plans.ring_all_reduce_plan,
    ("all_reduce", "bidirectional_ring"): plans.bidirectional_ring_all_reduce_plan,
    ("all_reduce", "direct"): plans.direct_all_reduce_plan,
    ("all_reduce", "master_worker"): plans.master_worker_all_reduce_plan,
    ("all_reduce", "halving_doubling"): plans.halving_doubling_all_reduce_plan,
    ("reduce_scatter", "ring"): plans.ring_reduce_scatter_plan,
    ("reduce_scatter", "bidirectional_ring"): plans.bidirectional_ring_reduce_scatter_plan,
    ("reduce_scatter", "direct"): plans.direct_reduce_scatter_plan,
    ("reduce_scatter", "halving_doubling"): plans.halving_doubling_reduce_scatter_plan,
    ("broadcast", "direct"): functools.partial(plans.direct_broadcast_plan, root=0),
    ("reduce", "direct"): functools.partial(plans.direct_reduce_plan, root=0),
    ("all_gather", "ring"): plans.ring_all_gather_plan,
    ("all_gather", "bidirectional_ring"): plans.bidirectional_ring_all_gather_plan,
    ("all_gather", "direct"): plans.direct_all_gather_plan,
    ("all_gather", "halving_doubling"): plans.halving_doubling_all_gather_plan,
    ("all_to_all", "direct"): plans.direct_all_to_all_plan,
}


OVER_NODES = {
    "all_reduce": plans.hierarchical_all_reduce_plan,
    "all_to_all": plans.hierarchical_all_to_all_plan,
}


CHUNKED_PLANS = {
    ("all_reduce", "tree"): plans.tree_all_reduce_plan,
    ("all_reduce", "double_tree"): plans.double_tree_all_reduce_plan,
    ("broadcast", "tree"): plans.tree_broadcast_plan,
    ("broadcast", "double_tree"): plans.double_tree_broadcast_plan,
    ("broadcast", "ring"): plans.ring_broadcast_plan,
    ("reduce", "tree"): plans.tree_reduce_plan,
    ("reduce", "double_tree"): plans.double_tree_reduce_plan,
    ("reduce", "ring"): plans.ring_reduce_plan,
}


def replayed_s(ranks_plans, num_bytes, topology):
    """Seconds of plans whose ranks wait for each other after each step, one message at a time."""
    # The plan of an all-to-all counts the tensors of all ranks as one.
    is_whole = ranks_plans[0].kept_pitch > 1
    num_bytes *= len(ranks_plans) if is_whole else 1
    total = 0.0
    for steps in zip(*(plan.steps for plan in ranks_plans), strict=True):
        busy = [0.0]
        for rank, step in enumerate(steps):
            plan = ranks_plans[rank]
            for parts in (step.sends, step.receives):
                lengths = [(part.peer, plan.part_numel(part, num_bytes)) for part in parts]
                busy.append(
                    sum(topology.link(rank, peer).time_s(length) for peer, length in lengths)
                )
        total += max(busy)
    return total


@pytest.mark.parametrize(("collective", "algorithm"), PLANS)
@pytest.mark.parametrize("ranks", range(1, 10))
def test_costs_are_those_of_the_plans_done_step_by_step(collective, algorithm, ranks):
    topology, num_bytes = one_node(ranks), 2 * 2520
    found = [PLANS[collective, algorithm](ranks, rank) for rank in range(ranks)]

    expected = replayed_s(found, num_bytes, topology)

    assert cost(collective, algorithm, num_bytes, topology).time_s == pytest.approx(expected)


@pytest.mark.parametrize(
    ("nodes", "each"), [(2, 1), (2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (1, 6)]
)
def test_costs_over_nodes_are_those_of_the_plans(nodes, each):
    topology, num_bytes, ranks = Topology(nodes, each, FAST, SLOW), 5040, nodes * each

    for (collective, algorithm), plan in PLANS.items():
        expected = replayed_s([plan(ranks, rank) for rank in range(ranks)], num_bytes, topology)
        found = cost(collective, algorithm, num_bytes, topology).time_s
        assert found == pytest.approx(expected), (collective, algorithm)
    for collective, plan in OVER_NODES.items():
        levels = [plan(ranks, rank, each) for rank in range(ranks)]
        found = cost(collective, "hierarchical", num_bytes, topology).time_s
        assert found == pytest.approx(replayed_s(levels, num_bytes, topology)), collective


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16, 17])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_costs_of_trees_are_at_most_a_few_messages_above_those_of_the_plans(ranks, chunks):
    topology, num_bytes = one_node(ranks), 48 * 2520
    root = ranks // 2

    for (collective, algorithm), plan_of in CHUNKED_PLANS.items():
        place = () if collective == "all_reduce" else (root,)
        plan = [plan_of(ranks, rank, *place, chunks) for rank in range(ranks)]
        expected = replayed_s(plan, num_bytes, topology)
        given = cost(collective, algorithm, num_bytes, topology, chunks=chunks)
        message = sum(phase.link.time_s(phase.bytes_per_step) for phase in given.phases)
        assert expected <= given.time_s * (1 + 1e-9)
        assert given.time_s <= expected + 4.001 * message


# ---------------------------------------------------------------- formulas


@settings(max_examples=10)
@given(ranks=st.integers(1, 300), num_bytes=st.integers(1, 2**40))
def test_a_ring_takes_two_n_minus_one_steps_and_twice_the_bytes_but_a_share(ranks, num_bytes):
    found = cost("all_reduce", "ring", num_bytes, one_node(ranks))

    moved = 2 * (ranks - 1) / ranks * num_bytes
    assert found.steps == 2 * (ranks - 1)
    assert found.bytes_sent == pytest.approx(moved)
    assert found.time_s == pytest.approx(2 * (ranks - 1) * 2.0 + moved / 4.0)
    for half in ("all_gather", "reduce_scatter"):
        assert cost(half, "ring", num_bytes, one_node(ranks)).time_s * 2 == pytest.approx(
            found.time_s
        )


@pytest.mark.parametrize("levels", range(1, 8))
def test_powers_of_two_are_halved_and_doubled_without_surplus(levels):
    ranks = 2**levels

    found = cost("all_reduce", "halving_doubling", 1024, one_node(ranks))

    assert found.steps == 2 * levels
    assert found.bytes_sent == 2 * (ranks - 1) / ranks * 1024


@pytest.mark.parametrize("ranks", [4, 8, 64, 1024])
def test_a_tree_takes_two_log2_n_steps_where_both_children_are_heard_at_once(ranks):
    found = cost("all_reduce", "tree", 1024, one_node(ranks, ports=2), chunks=1)

    assert found.steps == 2 * math.log2(ranks)


@pytest.mark.parametrize("ranks", [4, 9, 1000, 16384])
def test_a_double_tree_sends_twice_the_bytes_however_many_ranks_there_are(ranks):
    chunks = 10**6

    found = cost("all_reduce", "double_tree", GIB, one_node(ranks), chunks=chunks)

    assert found.chunks == chunks
    assert found.bytes_sent == pytest.approx(2 * GIB, rel=1e-3)
    # With two chunks for each of k: the four steps a level of messages one by one, and 2k.
    assert found.steps <= 4 * math.log2(ranks) + 2 * (2 * chunks)


def test_messages_of_direct_exchange_and_of_a_master_are_counted_one_by_one():
    assert cost("all_reduce", "direct", 100, one_node(5)).bytes_sent == 400
    assert cost("all_reduce", "master_worker", 100, one_node(5)).steps == 2 * 4
    assert cost("all_to_all", "direct", 100, one_node(5)).bytes_sent == 80
    assert cost("broadcast", "direct", 100, one_node(5)).bytes_sent == 400


@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), (9, 1), (9, 3), (9, 7)])
def test_the_link_of_a_server_carries_twice_the_tensor_for_each_worker(ranks, servers):
    found = cost("all_reduce", "parameter_server", 840, one_node(ranks), servers=servers)

    workers = ranks - servers
    assert found.bytes_sent == 2 * max(workers, servers) * 840 / servers


@given(nodes=st.integers(1, 40), each=st.integers(1, 8))
def test_hierarchies_send_a_device_share_of_the_tensor_across(nodes, each):
    topology, size = Topology(nodes, each, FAST, SLOW), 1e6

    phases = cost("all_reduce", "hierarchical", size, topology).phases

    near = sum(p.steps * p.bytes_per_step for p in phases if p.link == FAST)
    far = sum(p.steps * p.bytes_per_step for p in phases if p.link == SLOW)
    assert near == pytest.approx(2 * (each - 1) / each * size)
    assert far == pytest.approx(2 * (nodes - 1) / nodes * size / each)


def test_two_ports_halve_the_time_of_what_goes_both_ways():
    one, two = (
        cost("all_reduce", "bidirectional_ring", 4 * MIB, one_node(4, ports=ports)).time_s
        for ports in (1, 2)
    )

    assert one == pytest.approx(2 * two)
    assert one >= cost("all_reduce", "ring", 4 * MIB, one_node(4)).time_s


def test_both_directions_leave_a_node_at_two_devices_until_all_of_them_are_used():
    def gain(rings):
        topology = preset("h100", 16, rings=rings)
        ring, both = (
            cost("all_reduce", name, 1024 * GIB, topology).time_s
            for name in ("ring", "bidirectional_ring")
        )
        return ring / both

    assert gain(1) == pytest.approx(2 / (1 + 50 / 450), rel=1e-2)
    assert gain(3) == pytest.approx(2, rel=1e-2)
    assert gain(8) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_one_rank_alone_costs_nothing_and_more_bytes_never_cost_less(collective, algorithm):
    if algorithm != "parameter_server":
        assert cost(collective, algorithm, MIB, one_node(1)).time_s == 0
    topology = preset("h100", 3, 4)
    times = [cost(collective, algorithm, 4**power, topology).time_s for power in range(16)]
    assert times == sorted(times)
    assert all(time_s > 0 for time_s in times)
    assert cost(collective, algorithm, 0, topology).time_s > 0


@settings(max_examples=30)
@given(
    num_bytes=st.integers(1, 400),
    fill=st.integers(0, 30),
    each=st.integers(1, 4),
    latency=st.sampled_from([0.0, 0.1, 3.0, 50.0]),
)
def test_the_best_number_of_chunks_is_the_best_of_all(num_bytes, fill, each, latency):
    link = Link(latency, 2.0)

    def time_s(chunks):
        return (fill + each * chunks) * link.time_s(num_bytes / chunks)

    found = best_chunks(num_bytes, link, fill, each)

    assert time_s(found) <= min(map(time_s, range(1, num_bytes + 1))) * (1 + 1e-12)


# ---------------------------------------------------------------- choice


def test_few_bytes_want_few_steps_and_many_bytes_no_surplus():
    node, cluster = preset("h100"), preset("h100", 16)

    assert best("all_reduce", 8, node).algorithm == "halving_doubling"
    assert best("all_reduce", 8, cluster).algorithm == "halving_doubling"
    assert best("all_reduce", GIB, cluster).algorithm == "hierarchical"
    assert best("broadcast", GIB, cluster).algorithm == "double_tree"
    assert best("all_reduce", GIB, preset("h100", 1, 7)).algorithm == "ring"


def test_the_best_is_the_cheapest_of_those_that_may_be_chosen():
    topology = preset("a100", 2)

    for collective in COLLECTIVES:
        found = costs(collective, MIB, topology)
        assert [each.time_s for each in found] == sorted(each.time_s for each in found)
        assert found[0] == best(collective, MIB, topology)
        assert {each.algorithm for each in found} == (
            set(algorithms_for(collective)) - {"parameter_server"}
        )
    assert best("all_reduce", GIB, topology, algorithms=["direct", "tree"]).algorithm == "tree"


def test_of_equal_costs_the_simplest_algorithm_is_chosen():
    assert best("all_reduce", MIB, one_node(1)).algorithm == "ring"
    assert best("all_gather", MIB, one_node(2)).algorithm == "ring"


def test_sixteen_thousand_devices_are_costed_in_no_time():
    topology = preset("h100", 2048)

    start = time.process_time()
    for collective, power in itertools.product(COLLECTIVES, range(0, 34, 3)):
        best(collective, 2**power, topology)

    assert time.process_time() - start < 2.0


# ---------------------------------------------------------------- what others measured

# Bus bandwidths of all-reduce in 1e9 bytes a second: NVIDIA, GTC24 session s62129 (slide 18), and
# stas00/ml-engineering network/README.md, without sums in the switch.
MEASURED = [
    (preset("pcie4"), 24),
    (preset("pcie5"), 48),
    (preset("a100"), 232),
    (preset("h100"), 370),
    (preset("h200"), 365.6),
    (preset("b200"), 700),
    (preset("b200", 1, 72), 680),
    (preset("a100", 4, rings=8), 192),
    (preset("h100", 4, rings=8), 380),
]


@pytest.mark.parametrize(("topology", "gigabytes"), MEASURED)
def test_large_measured_rings_reach_three_quarters_of_a_preset_and_never_all_of_it(
    topology, gigabytes
):
    found = cost("all_reduce", "ring", 64 * GIB, topology).bus_bytes_per_s / 1e9

    assert 0.75 * found < gigabytes < found


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_reduce", 2, 1.0),
        ("reduce_scatter", 8, 0.875),
        ("all_gather", 8, 0.875),
        ("all_to_all", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("all_gather", 1, 0.0),
    ],
)
def test_bus_bandwidth_factors_are_those_of_nccl_tests(collective, ranks, factor):
    assert busbw_factor(collective, ranks) == factor


def test_the_bus_bandwidth_of_a_ring_without_latency_is_that_of_its_link():
    link = Link(0.0, 123e9)
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        found = cost(collective, "ring", GIB, Topology(1, 6, link, link))
        assert found.bus_bytes_per_s == pytest.approx(123e9)
    # 8 devices, 1 GiB in 8203.9 us: nccl-tests printed 229.04.
    assert bus_bandwidth("all_reduce", 8, GIB, 8203.9e-6) == pytest.approx(229.04e9, rel=1e-4)
    assert cost("all_reduce", "ring", GIB, one_node(1)).bus_bytes_per_s == math.inf


# ---------------------------------------------------------------- tables and mistakes


def test_a_table_has_a_line_a_size_and_names_the_best():
    topology = preset("h100", 2)

    lines = format_costs("all_gather", [KIB, 3 * MIB, GIB], topology).splitlines()

    assert len(lines) == 4
    assert lines[0].split() == [
        "size",
        *(word for name in algorithms_for("all_gather") for word in (name, "us")),
        "best",
    ]
    for line, size in zip(lines[1:], [KIB, 3 * MIB, GIB], strict=True):
        assert line.split()[-1] == best("all_gather", size, topology).algorithm
    assert [format_bytes(size) for size in (0, 8, KIB, 3 * MIB // 2, 5 * 2**50)] == [
        "0 B",
        "8 B",
        "1 KiB",
        "1.5 MiB",
        "5120 TiB",
    ]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda t: cost("allreduce", "ring", 8, t), "did you mean 'all_reduce'"),
        (lambda t: cost("all_to_all", "ring", 8, t), "it has direct, hierarchical"),
        (lambda t: cost("all_reduce", "ring", -1, t), "num_bytes=-1 must be finite"),
        (lambda t: cost("all_reduce", "tree", 8, t, chunks=0), "chunks=0 must be"),
        (
            lambda t: cost("all_reduce", "parameter_server", 8, t, servers=8),
            "servers=8 of 8 ranks leaves no worker",
        ),
        (lambda t: best("all_reduce", 8, t, algorithms=[]), "no algorithms to choose from"),
        (lambda t: busbw_factor("all_reduce", 0), "ranks=0 must be at least 1"),
        (lambda t: bus_bandwidth("all_reduce", 2, 8, 0.0), "time_s=0.0 must be positive"),
    ],
)
def test_what_cannot_be_costed_is_refused(mistake, message):
    with pytest.raises(UsageError, match=message):
        mistake(preset("h100"))
