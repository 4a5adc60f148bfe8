"""The messages of each algorithm, as the busiest device sends and receives them one after another.

n is the number of ranks, g the devices of each of k nodes, K the bytes of the large tensor and h
the height of a binary tree, ``floor(log2 n)``. Every function returns the phases of one collective,
whose times add up. Those of the algorithms in `algorithms` are read off their plans, at most a few
messages above them where the numbers do not divide. One port is meant throughout; more ports
halve, and so on, the rounds of messages that need not wait for each other.

Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH
(2005); Sanders, Speck, Träff: Two-tree algorithms (2009); Patarasuk, Yuan (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from trainwright.collectives.phases import Phase, Phases, PhasesOf, Request, pipelined, rounds
from trainwright.collectives.topology import Link, Topology


def _ring(passes: int) -> PhasesOf:
    """Each pass goes n - 1 times with a chunk of K / n, over the slowest link of the ring."""

    def phases(request: Request) -> Phases:
        ranks = request.topology.size
        steps = passes * (ranks - 1)
        return (Phase(steps, request.num_bytes / ranks, request.topology.ring_link),)

    return phases


def _bidirectional_ring(passes: int) -> PhasesOf:
    """Half of each chunk each way: the same bytes, and half the time where there are two ports.

    A ring leaves a node at one device each way; that device has its other neighbour in the node.
    """

    def phases(request: Request) -> Phases:
        topology = request.topology
        steps = passes * (topology.size - 1)
        half = request.num_bytes / topology.size / 2
        if topology.rings > 1:
            exits = min(2 * topology.rings, topology.devices_per_node)
            far = Phase(steps, half, attrs.evolve(topology, rings=exits).ring_link)
            return (far,) if topology.ports > 1 else (far, far)
        far = Phase(steps, half, topology.ring_link)
        if topology.ports > 1:
            return (far,)
        if topology.nodes == 1 or topology.devices_per_node == 1:
            return far, far
        return Phase(steps, half, topology.inside), far

    return phases


def _direct(passes: int, share: Callable[[int], float]) -> PhasesOf:
    """One message to each of the others, ``share(n)`` of K long; those of the own node inside."""

    def phases(request: Request) -> Phases:
        topology = request.topology
        near = topology.devices_per_node - 1
        far = topology.size - topology.devices_per_node
        num_bytes = request.num_bytes * share(topology.size)
        return (
            Phase(passes * rounds(near, topology), num_bytes, topology.inside),
            Phase(passes * rounds(far, topology), num_bytes, topology.across),
        )

    return phases


def _parameter_server(request: Request) -> Phases:
    """Every worker sends each of the servers its part of the gradients, and gets as much back.

    The server's link carries ``2 * workers * K / servers``.
    """
    topology, servers = request.topology, request.servers
    workers = topology.size - servers
    steps = 2 * rounds(max(workers, servers), topology)
    return (Phase(steps, request.num_bytes / servers, topology.slowest_link),)


def _tree_all_reduce(request: Request) -> Phases:
    """Two children a level up and down for the first chunk; chunks go up and down at once.

    For each further chunk an inner rank sends one message up and two down. Trees of two and three
    ranks have no inner ranks but the root.
    """
    topology = request.topology
    height = topology.size.bit_length() - 1
    level = rounds(min(2, topology.size - 1), topology)
    each = rounds(min(3, topology.size - 1), topology)
    return pipelined(request, 2 * height * level, each)


def _tree(request: Request) -> Phases:
    """Down a tree, or up: two children, one after the other, at each level and for each chunk."""
    topology = request.topology
    height = topology.size.bit_length() - 1
    level = rounds(min(2, topology.size - 1), topology)
    return pipelined(request, height * level, level)


def _double_tree_all_reduce(request: Request) -> Phases:
    """Half of the tensor through each of two trees, whose inner ranks are the other's leaves.

    For each further chunk a rank sends one message up and two down where it is an inner rank, and
    one up where it is a leaf: 2 K in all, however many ranks there are.
    """
    topology = request.topology
    height = topology.size.bit_length() - 1
    level = rounds(min(2, topology.size - 1), topology)
    each = rounds(min(4, topology.size), topology)
    return pipelined(request, 2 * height * level, each, parts=2)


def _double_tree(request: Request) -> Phases:
    """Down two trees, or up, with half of the tensor each: K in all for every rank.

    The root stands above two trees of the other ranks.
    """
    topology = request.topology
    height = (topology.size - 1).bit_length()
    each = rounds(2, topology)
    return pipelined(request, height * each, each, parts=2)


def _chain(request: Request) -> Phases:
    """Chunks follow each other around the ring, from the root to the rank before it."""
    return pipelined(request, request.topology.size - 1, 1)


def _halving_doubling(passes: int) -> PhasesOf:
    """K / 2 to the partner half the ranks away, K / 4 a quarter, …; back the same way.

    Where the halves of a group differ by one, a rank of the smaller one has two partners.
    """

    def phases(request: Request) -> Phases:
        topology = request.topology
        chunk = request.num_bytes / topology.size
        found = []
        for level in range((topology.size - 1).bit_length()):
            groups = {topology.size >> level, -(-topology.size >> level)} - {1}
            link = _link_at(level, topology)
            steps = [
                Phase(passes * rounds(1 + group % 2, topology), group // 2 * chunk, link)
                for group in groups
            ]
            found.append(max(steps, key=lambda phase: phase.time_s))
        return tuple(found)

    return phases


def _hierarchical(request: Request) -> Phases:
    """Reduce-scatter in the node, all-reduce over the nodes, all-gather in the node, as rings."""
    topology, num_bytes = request.topology, request.num_bytes
    each, nodes = topology.devices_per_node, topology.nodes
    near = Phase(each - 1, num_bytes / each, topology.inside)
    far = Phase(2 * (nodes - 1), num_bytes / each / nodes, topology.across)
    return near, far, near


def _hierarchical_half(request: Request) -> Phases:
    """A ring in the node and a ring over the nodes, each rank with its K / g."""
    topology, num_bytes = request.topology, request.num_bytes
    each, nodes = topology.devices_per_node, topology.nodes
    return (
        Phase(each - 1, num_bytes / each, topology.inside),
        Phase(nodes - 1, num_bytes / each / nodes, topology.across),
    )


def _hierarchical_all_to_all(request: Request) -> Phases:
    """First to the device of the own node that stands as the target does in its node.

    Each message takes along what goes the same way: K / g in the node, K / k across.
    """
    topology, num_bytes = request.topology, request.num_bytes
    each, nodes = topology.devices_per_node, topology.nodes
    return (
        Phase(rounds(each - 1, topology), num_bytes / each, topology.inside),
        Phase(rounds(nodes - 1, topology), num_bytes / nodes, topology.across),
    )


def _link_at(level: int, topology: Topology) -> Link:
    """Return the slowest link of partners in groups of ``n / 2^level`` neighbouring ranks.

    Once the groups are parts of nodes, they remain so.
    """
    for higher in range(level + 1):
        group, surplus = divmod(topology.size, 1 << higher)
        if surplus == 0 and topology.devices_per_node % group == 0:
            return topology.inside
    return topology.slowest_link


def _whole(ranks: int) -> float:
    return 1.0


def _part(ranks: int) -> float:
    return 1.0 / ranks


ALGORITHMS: Mapping[str, Mapping[str, PhasesOf]] = MappingProxyType(
    {
        "all_reduce": {
            "ring": _ring(2),
            "bidirectional_ring": _bidirectional_ring(2),
            "halving_doubling": _halving_doubling(2),
            "double_tree": _double_tree_all_reduce,
            "tree": _tree_all_reduce,
            "hierarchical": _hierarchical,
            "direct": _direct(1, _whole),
            "master_worker": _direct(2, _whole),
            "parameter_server": _parameter_server,
        },
        "reduce_scatter": {
            "ring": _ring(1),
            "bidirectional_ring": _bidirectional_ring(1),
            "halving_doubling": _halving_doubling(1),
            "hierarchical": _hierarchical_half,
            "direct": _direct(1, _part),
        },
        "all_gather": {
            "ring": _ring(1),
            "bidirectional_ring": _bidirectional_ring(1),
            "halving_doubling": _halving_doubling(1),
            "hierarchical": _hierarchical_half,
            "direct": _direct(1, _part),
        },
        "broadcast": {
            "ring": _chain,
            "double_tree": _double_tree,
            "tree": _tree,
            "direct": _direct(1, _whole),
        },
        "reduce": {
            "ring": _chain,
            "double_tree": _double_tree,
            "tree": _tree,
            "direct": _direct(1, _whole),
        },
        "all_to_all": {
            "direct": _direct(1, _part),
            "hierarchical": _hierarchical_all_to_all,
        },
    }
)
"""The algorithms of each collective, by name."""
