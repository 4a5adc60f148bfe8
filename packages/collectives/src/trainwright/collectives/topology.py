"""Which devices stand in which node, and what a message between two of them costs.

Ranks are laid out node by node: rank r is in node ``r // devices_per_node``. Times are those of the
α-β model (Hockney): a message of b bytes takes ``latency_s + b / bytes_per_s``. A device sends one
message and receives one at the same time; further ones wait, unless it has more ports.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import attrs

from trainwright.collectives.errors import UsageError


def _check_positive(value: object, attribute: attrs.Attribute[float], number: float) -> None:
    if not (number > 0 and math.isfinite(number)):
        raise UsageError(
            f"{type(value).__name__}: {attribute.name}={number!r} must be positive and finite"
        )


def _check_not_negative(value: object, attribute: attrs.Attribute[float], number: float) -> None:
    if not (number >= 0 and math.isfinite(number)):
        raise UsageError(
            f"{type(value).__name__}: {attribute.name}={number!r} must be finite and at least 0"
        )


def _check_count(value: object, attribute: attrs.Attribute[int], count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"{type(value).__name__}: {attribute.name}={count!r} must be a number of at least 1"
        )


@attrs.frozen
class Link:
    """What one device reaches another over, each way.

    Args:
        latency_s: Seconds until a message without bytes has arrived.
        bytes_per_s: Bytes a second in one direction, while the other is in use too.
    """

    latency_s: float = attrs.field(validator=_check_not_negative)
    bytes_per_s: float = attrs.field(validator=_check_positive)

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds that one message takes."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def slower_of(self, other: Link) -> Link:
        """Return a link with the longer latency and the smaller bandwidth of the two."""
        return Link(max(self.latency_s, other.latency_s), min(self.bytes_per_s, other.bytes_per_s))


# Bandwidths are half of what vendors print for both directions together. Latencies are those that
# NCCL's own model gives a step of a ring of its plain protocol.
# Source: NVIDIA's data sheets; NCCL src/graph/tuning.cc, hwLat (NVLINK, PCI, NET; Ring, Simple).
NVLINK_3 = Link(latency_s=3.4e-6, bytes_per_s=300e9)
NVLINK_4 = Link(latency_s=3.4e-6, bytes_per_s=450e9)
NVLINK_5 = Link(latency_s=3.4e-6, bytes_per_s=900e9)
PCIE_4 = Link(latency_s=5.7e-6, bytes_per_s=31e9)
PCIE_5 = Link(latency_s=5.7e-6, bytes_per_s=63e9)
HDR = Link(latency_s=14e-6, bytes_per_s=25e9)
NDR = Link(latency_s=14e-6, bytes_per_s=50e9)

PRESETS: Mapping[str, tuple[Link, Link]] = MappingProxyType(
    {
        "a100": (NVLINK_3, HDR),
        "h100": (NVLINK_4, NDR),
        "h200": (NVLINK_4, NDR),
        "b200": (NVLINK_5, NDR),
        "pcie4": (PCIE_4, HDR),
        "pcie5": (PCIE_5, NDR),
    }
)
"""The link in a node and the network port of each device, by the usual name."""


@attrs.frozen
class Topology:
    """Nodes of as many devices each; one kind of link in a node and one between nodes.

    Args:
        nodes: Number of nodes.
        devices_per_node: Ranks of a node.
        inside: Link of two devices of a node.
        across: Link of two devices of different nodes: a device's share of the node's network.
        rings: Rings that the transport cuts a tensor into, each of which leaves a node at another
            device, so that together they have as many times the bandwidth of ``across``. 1 for
            rings of messages; NCCL makes as many as a node has network ports.
        ports: Messages that a device sends, and receives, at the same time at full bandwidth: 1
            where it stands at a switch, 2 where each neighbour of a ring has a wire of its own.

    Raises:
        UsageError: A number is below 1, or there are more rings than devices to leave a node at.
    """

    nodes: int = attrs.field(validator=_check_count)
    devices_per_node: int = attrs.field(validator=_check_count)
    inside: Link
    across: Link
    rings: int = attrs.field(default=1, validator=_check_count, kw_only=True)
    ports: int = attrs.field(default=1, validator=_check_count, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.rings > self.devices_per_node:
            raise UsageError(
                f"rings={self.rings} must each leave a node at another of its devices_per_node="
                f"{self.devices_per_node} devices"
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.devices_per_node

    @property
    def ring_link(self) -> Link:
        """The slowest link of a ring through all ranks, node by node.

        Rings that leave a node at different devices share the links in the node.
        """
        if self.nodes == 1:
            return self.inside
        across = Link(self.across.latency_s, self.across.bytes_per_s * self.rings)
        return across if self.devices_per_node == 1 else across.slower_of(self.inside)

    @property
    def slowest_link(self) -> Link:
        """The slowest link that some pair of ranks needs."""
        if self.nodes == 1:
            return self.inside
        return self.across if self.devices_per_node == 1 else self.across.slower_of(self.inside)

    def node_of(self, rank: int) -> int:
        """Return the node that a rank is in."""
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is not one of the {self.size} ranks 0..{self.size - 1}")
        return rank // self.devices_per_node

    def link(self, first: int, second: int) -> Link:
        """Return the link of two different ranks."""
        if first == second:
            raise UsageError(f"rank {first} needs no link to itself")
        return self.inside if self.node_of(first) == self.node_of(second) else self.across

    def among(self, ranks: Iterable[int]) -> Topology:
        """Return the topology that some of the ranks see: those of one axis of a mesh, say.

        A device keeps its own share of the network, because the other groups of the axis talk at
        the same time.

        Raises:
            UsageError: A rank is unknown or comes twice, or the nodes hold different numbers.
        """
        chosen = list(ranks)
        counts = Counter(map(self.node_of, chosen))
        held = set(counts.values())
        if not chosen or len(set(chosen)) != len(chosen):
            raise UsageError(f"ranks must be some different ranks, got {_shorten(chosen)}")
        if len(held) != 1:
            raise UsageError(
                f"the ranks {_shorten(chosen)} lie unevenly on the nodes, {min(held)} to "
                f"{max(held)} of them in one; a topology has the same number in each: choose axes "
                f"that divide devices_per_node={self.devices_per_node}, or are multiples of it"
            )
        [each] = held
        return attrs.evolve(
            self, nodes=len(counts), devices_per_node=each, rings=min(self.rings, each)
        )


def preset(name: str, nodes: int = 1, devices_per_node: int = 8, *, rings: int = 1) -> Topology:
    """Return a usual cluster by the name of its device: one of `PRESETS`.

    Args:
        name: "a100", "h100", "h200", "b200" (NVLink in a node and a network port for each device:
            HDR for the A100, NDR for the others), "pcie4", "pcie5".
        nodes: Number of nodes.
        devices_per_node: 8, or what a node has; 72 for racks that NVLink spans.
        rings: As in `Topology`; NCCL makes as many as devices.

    Raises:
        UsageError: The name is not known.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"there is no preset {name!r}, did you mean {near!r}? Known: {', '.join(PRESETS)}; "
            "anything else is a Topology(nodes, devices_per_node, inside, across)"
        )
    inside, across = PRESETS[name]
    return Topology(nodes, devices_per_node, inside, across, rings=rings)


def _shorten(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"{str(ranks[:8])[:-1]}, … ({len(ranks)})]"
