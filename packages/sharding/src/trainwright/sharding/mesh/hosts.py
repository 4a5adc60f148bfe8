"""Which host each rank is on, and which axes leave a host: plain data without communication."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.axes import EXPERT_AXES, HYBRID_AXES, number_at, view_of
from trainwright.sharding.mesh.fitting import divisors
from trainwright.sharding.mesh.shape import MeshShape

_COSTLY = ("tp", "etp")


@attrs.frozen(hash=False)
class PlacementTable:
    """Where the ranks of a mesh are; made by `placement_table`. Its text has one line a host.

    Args:
        shape: The mesh.
        ranks_per_host: Ranks on each host but perhaps the last, in the order of their numbers.
        spans: By axis of more than one rank, the most hosts that the ranks along it are on.
    """

    shape: MeshShape
    ranks_per_host: int
    spans: Mapping[str, int]

    @property
    def num_hosts(self) -> int:
        """Hosts that have ranks."""
        return -(-self.shape.world_size // self.ranks_per_host)

    @property
    def leaving(self) -> tuple[str, ...]:
        """The axes along which some ranks are on several hosts."""
        return tuple(axis for axis, hosts in self.spans.items() if hosts > 1)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely a mistake: a tensor axis that leaves a host, a host that is not full."""
        found = [self._warning(axis) for axis in _COSTLY if self.spans.get(axis, 1) > 1]
        last = self.shape.world_size % self.ranks_per_host
        if last and self.num_hosts > 1:
            found.append(f"the last host has {last} of {self.ranks_per_host} ranks")
        return tuple(found)

    def host(self, rank: int) -> int:
        """Return the host of a rank.

        Raises:
            ShardingError: There is no such rank.
        """
        if not 0 <= rank < self.shape.world_size:
            raise ShardingError(f"rank must be in 0..{self.shape.world_size - 1}, got {rank}")
        return rank // self.ranks_per_host

    def ranks(self, host: int) -> range:
        """Return the ranks of a host.

        Raises:
            ShardingError: There is no such host.
        """
        if not 0 <= host < self.num_hosts:
            raise ShardingError(f"host must be in 0..{self.num_hosts - 1}, got {host}")
        first = host * self.ranks_per_host
        return range(first, min(first + self.ranks_per_host, self.shape.world_size))

    def __str__(self) -> str:
        places = self.shape.places_of(np.arange(self.shape.world_size))
        rows = [["host", "ranks", *self.spans]]
        for host in range(self.num_hosts):
            ranks = self.ranks(host)
            here = slice(ranks.start, ranks.stop)
            cells = [_ranges(np.unique(places[axis][here])) for axis in self.spans]
            rows.append([str(host), _ranges(np.asarray(ranks)), *cells])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        for axis, hosts in self.spans.items():
            where = "stays on a host" if hosts == 1 else f"spans {hosts} hosts"
            lines.append(f"{axis}={self.shape.size(axis)} {where}")
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])

    def _warning(self, axis: str) -> str:
        size = self.shape.size(axis)
        if self.ranks_per_host % size:
            fitting = max(d for d in divisors(self.ranks_per_host) if d <= size)
            way_out = f"choose {axis}={fitting}, which divides the {self.ranks_per_host} ranks"
        else:
            inside = [other for other in self.shape.order if other != "tp"]
            way_out = f"put tp innermost: order={'/'.join((*inside, 'tp'))}"
        return (
            f"{axis}={size} spans {self.spans[axis]} hosts of {self.ranks_per_host} ranks, so that "
            f"the collectives of every layer leave the host; {way_out}"
        )


def placement_table(shape: MeshShape, ranks_per_host: int) -> PlacementTable:
    """Return on which host each rank of a mesh is, where hosts are filled one after the other.

    Args:
        shape: The mesh.
        ranks_per_host: Ranks on each host.

    Raises:
        ShardingError: ``ranks_per_host`` is not a positive int.
    """
    if not isinstance(ranks_per_host, int) or isinstance(ranks_per_host, bool):
        raise ShardingError(f"ranks_per_host must be a positive int, got {ranks_per_host!r}")
    if ranks_per_host < 1:
        raise ShardingError(f"ranks_per_host must be a positive int, got {ranks_per_host}")
    dense = ("pp", "dp", *(HYBRID_AXES[1:3] if shape.dp_shard is not None else ()), "cp", "tp")
    expert = EXPERT_AXES[1:] if shape.ep > 1 or shape.etp != shape.tp else ()
    ranks = np.arange(shape.world_size)
    places = shape.places_of(ranks)
    hosts = ranks // ranks_per_host
    spans = {
        axis: _span(axis, shape, places, hosts)
        for axis in (*dense, *expert)
        if shape.size(axis) > 1
    }
    return PlacementTable(shape, ranks_per_host, spans)


def _span(
    axis: str, shape: MeshShape, places: Mapping[str, NDArray[np.int64]], hosts: NDArray[np.int64]
) -> int:
    view = view_of((axis,))
    assert view is not None
    fixed = [other for other in view if other != axis]
    groups = number_at(places, fixed, {other: shape.size(other) for other in fixed})
    num_hosts = int(hosts[-1]) + 1
    pairs = np.unique(groups * num_hosts + hosts)
    return int(np.bincount(pairs // num_hosts).max())


def _ranges(values: NDArray[np.int64]) -> str:
    """Return increasing numbers with runs in short, as in 0-3,8-11."""
    parts = np.split(values, np.flatnonzero(np.diff(values) > 1) + 1)
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
