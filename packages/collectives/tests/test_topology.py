import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.collectives.errors import UsageError
from trainwright.collectives.topology import HDR, NDR, NVLINK_3, NVLINK_4, Link, Topology, preset

FAST, SLOW = Link(1e-6, 100e9), Link(5e-6, 10e9)


def test_a_message_takes_a_latency_and_its_bytes_over_the_bandwidth():
    assert Link(2e-6, 1e9).time_s(1000) == pytest.approx(3e-6)
    assert Link(2e-6, 1e9).time_s(0) == 2e-6


@given(nodes=st.integers(1, 5), each=st.integers(1, 5), data=st.data())
def test_ranks_lie_node_by_node_and_use_the_link_of_where_they_are(nodes, each, data):
    topology = Topology(nodes, each, FAST, SLOW)
    rank = data.draw(st.integers(0, topology.size - 1))
    other = data.draw(st.integers(0, topology.size - 1))

    assert topology.size == nodes * each
    assert topology.node_of(rank) == rank // each
    if rank != other:
        same = topology.node_of(rank) == topology.node_of(other)
        assert topology.link(rank, other) is (FAST if same else SLOW)
        assert topology.link(rank, other) is topology.link(other, rank)


def test_a_ring_is_as_slow_as_its_slowest_link():
    assert Topology(1, 8, FAST, SLOW).ring_link == FAST
    assert Topology(2, 8, FAST, SLOW).ring_link == SLOW
    assert Topology(2, 1, FAST, SLOW).ring_link == SLOW
    # The latency of one and the bandwidth of the other.
    assert Topology(2, 2, Link(9e-6, 1e9), Link(1e-6, 2e9)).ring_link == Link(9e-6, 1e9)


@pytest.mark.parametrize(("rings", "gigabytes"), [(1, 10), (4, 40), (8, 80), (16, 100)])
def test_rings_that_leave_a_node_at_different_devices_add_their_bandwidths(rings, gigabytes):
    topology = Topology(2, 16, FAST, SLOW, rings=rings)

    assert topology.ring_link.bytes_per_s == gigabytes * 1e9
    assert topology.slowest_link == SLOW


@pytest.mark.parametrize(
    ("ranks", "nodes", "each"),
    [
        (range(32), 4, 8),
        (range(8, 16), 1, 8),
        (range(0, 32, 8), 4, 1),
        (range(3, 32, 4), 4, 2),
        ([5], 1, 1),
        ([0, 1, 30, 31], 2, 2),
    ],
)
def test_the_ranks_of_an_axis_see_a_topology_of_their_own(ranks, nodes, each):
    seen = Topology(4, 8, FAST, SLOW, rings=4, ports=2).among(ranks)

    assert seen == Topology(nodes, each, FAST, SLOW, rings=min(4, each), ports=2)


@pytest.mark.parametrize(
    ("name", "inside_gigabytes", "across_gigabytes"),
    [
        ("a100", 300, 25),
        ("h100", 450, 50),
        ("h200", 450, 50),
        ("b200", 900, 50),
        ("pcie4", 31, 25),
        ("pcie5", 63, 50),
    ],
)
def test_presets_have_half_of_the_printed_bandwidth_each_way(
    name, inside_gigabytes, across_gigabytes
):
    topology = preset(name, 3)

    assert topology.size == 24
    assert topology.inside.bytes_per_s == inside_gigabytes * 1e9
    assert topology.across.bytes_per_s == across_gigabytes * 1e9
    assert topology.across.latency_s > topology.inside.latency_s > 0


def test_presets_are_plain_values():
    assert preset("a100", 2, 4) == Topology(2, 4, NVLINK_3, HDR)
    assert preset("h100", 2, rings=8) == Topology(2, 8, NVLINK_4, NDR, rings=8)
    assert hash(preset("b200", 1, 72)) == hash(preset("b200", 1, 72))


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Link(-1e-6, 1e9), "latency_s=-1e-06 must be finite and at least 0"),
        (lambda: Link(0.0, 0.0), "bytes_per_s=0.0 must be positive and finite"),
        (lambda: Link(float("nan"), 1e9), "latency_s=nan"),
        (lambda: Topology(0, 8, FAST, SLOW), "nodes=0 must be a number of at least 1"),
        (lambda: Topology(1, 1.5, FAST, SLOW), "devices_per_node=1.5"),
        (lambda: Topology(2, 4, FAST, SLOW, rings=5), "rings=5 must each leave"),
        (lambda: Topology(2, 4, FAST, SLOW, ports=0), "ports=0"),
        (lambda: preset("h10"), "did you mean 'h100'"),
        (lambda: preset("a100").node_of(8), "rank 8 is not one of the 8 ranks 0..7"),
        (lambda: preset("a100").link(1, 1), "no link to itself"),
        (lambda: preset("a100", 2).among(range(12)), "unevenly on the nodes, 4 to 8 of them"),
        (lambda: preset("a100", 2).among([]), "some different ranks"),
        (lambda: preset("a100", 2).among([1, 1]), "some different ranks"),
    ],
)
def test_what_is_no_topology_is_refused(mistake, message):
    with pytest.raises(UsageError, match=message):
        mistake()
