"""What a collective costs by each algorithm on a topology, and which one is best.

Sizes are those of nccl-tests: ``num_bytes`` is the large tensor of a rank, the one that is reduced,
gathered to, scattered from, broadcast, or exchanged as a whole. Costs are of algorithms that finish
one step before the next, as those of `algorithms` do; it has all of them. With ``Topology.rings``
the costs of rings are those of NCCL's. The time that devices take to add numbers is not in them,
nor that partial sums of 16-bit tensors travel in float32.

Source: Hockney: The communication challenge for MPP (1994); nccl-tests doc/PERFORMANCE.md.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from trainwright.collectives.algorithm_phases import ALGORITHMS
from trainwright.collectives.errors import UsageError
from trainwright.collectives.phases import Phase, PhasesOf, Request
from trainwright.collectives.topology import Topology

# Nobody who asks for a sum on every rank wants some ranks to be servers.
_NOT_A_CHOICE = ("parameter_server",)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@attrs.frozen
class Cost:
    """What one collective costs by one algorithm.

    Args:
        collective: Which one.
        algorithm: By which algorithm.
        num_bytes: Of the large tensor.
        ranks: How many take part.
        phases: The messages of the busiest device, in order.
    """

    collective: str
    algorithm: str
    num_bytes: float
    ranks: int
    phases: tuple[Phase, ...]

    @property
    def time_s(self) -> float:
        """Seconds from the first rank's start to the last one's end."""
        return sum(phase.time_s for phase in self.phases)

    @property
    def steps(self) -> int:
        """Messages that the busiest device sends or receives one after another."""
        return sum(phase.steps for phase in self.phases)

    @property
    def chunks(self) -> int:
        """The pieces that a tree cuts the tensor into (a double tree: each half), else 1."""
        return max((phase.chunks for phase in self.phases), default=1)

    @property
    def bytes_sent(self) -> float:
        """Bytes through the busiest device's port, one way."""
        return sum(phase.steps * phase.bytes_per_step for phase in self.phases)

    @property
    def bus_bytes_per_s(self) -> float:
        """The bus bandwidth that nccl-tests would print; infinite where nothing is sent."""
        if self.time_s == 0:
            return math.inf
        return bus_bandwidth(self.collective, self.ranks, self.num_bytes, self.time_s)


def cost(
    collective: str,
    algorithm: str,
    num_bytes: float,
    topology: Topology,
    *,
    chunks: int | None = None,
    servers: int = 1,
) -> Cost:
    """Return what ``collective`` costs by ``algorithm``.

    Args:
        collective: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce" or
            "all_to_all".
        algorithm: One of `algorithms_for` it.
        num_bytes: Of the large tensor of a rank.
        topology: The ranks, their nodes and links.
        chunks: Pieces that trees and the broadcast along a ring cut the tensor into, a double tree
            each half; None: the number at which the time is least.
        servers: Ranks that are parameter servers; the others are workers.

    Raises:
        UsageError: A name or a number is not one of those.
    """
    phases_of = _algorithm(collective, algorithm)
    _check_size(num_bytes)
    if chunks is not None and (not isinstance(chunks, int) or chunks < 1):
        raise UsageError(f"chunks={chunks!r} must be a number of at least 1, or None for the best")
    if algorithm == "parameter_server" and not 1 <= servers < topology.size:
        raise UsageError(
            f"servers={servers} of {topology.size} ranks leaves no worker, or no server; use 1 to "
            f"{topology.size - 1}"
        )
    phases = phases_of(Request(num_bytes, topology, chunks, servers))
    kept = tuple(phase for phase in phases if phase.steps)
    return Cost(collective, algorithm, num_bytes, topology.size, kept)


def costs(
    collective: str,
    num_bytes: float,
    topology: Topology,
    *,
    algorithms: Iterable[str] | None = None,
) -> tuple[Cost, ...]:
    """Return the costs of several algorithms, the cheapest first.

    Args:
        collective: As in `cost`.
        num_bytes: As in `cost`.
        topology: As in `cost`.
        algorithms: Which ones; None: all but parameter servers, whose servers do not get the sum.

    Raises:
        UsageError: As `cost` does, or there are no algorithms to choose from.
    """
    if algorithms is None:
        algorithms = [name for name in algorithms_for(collective) if name not in _NOT_A_CHOICE]
    found = [cost(collective, name, num_bytes, topology) for name in algorithms]
    if not found:
        raise UsageError(f"no algorithms to choose from; {collective} has {_names(collective)}")
    return tuple(sorted(found, key=lambda each: each.time_s))


def best(
    collective: str,
    num_bytes: float,
    topology: Topology,
    *,
    algorithms: Iterable[str] | None = None,
) -> Cost:
    """Return the cheapest of `costs`; of equal ones the first in the order of `algorithms_for`."""
    return costs(collective, num_bytes, topology, algorithms=algorithms)[0]


def algorithms_for(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms of a collective."""
    return tuple(_algorithms(collective))


def busbw_factor(collective: str, ranks: int) -> float:
    """Return by what nccl-tests multiplies bytes per second to get the bus bandwidth.

    ``2 (n - 1) / n`` for all-reduce, ``(n - 1) / n`` for reduce-scatter, all-gather and
    all-to-all, 1 for broadcast and reduce: what the links of a best algorithm carry for each byte.

    Raises:
        UsageError: The collective is unknown, or there are no ranks.
    """
    _algorithms(collective)
    if ranks < 1:
        raise UsageError(f"ranks={ranks} must be at least 1")
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(collective: str, ranks: int, num_bytes: float, time_s: float) -> float:
    """Return the bus bandwidth of a measured time, in bytes a second, as nccl-tests does."""
    if not time_s > 0:
        raise UsageError(f"time_s={time_s!r} must be positive")
    return num_bytes / time_s * busbw_factor(collective, ranks)


def format_costs(
    collective: str,
    sizes: Sequence[float],
    topology: Topology,
    *,
    algorithms: Iterable[str] | None = None,
) -> str:
    """Return a table: a line a size, the microseconds of each algorithm, and the best.

    Args:
        collective: As in `costs`.
        sizes: Bytes of the large tensor.
        topology: As in `costs`.
        algorithms: As in `costs`.
    """
    names = [name for name in algorithms_for(collective) if name not in _NOT_A_CHOICE]
    names = names if algorithms is None else list(algorithms)
    lines = [["size", *(f"{name} us" for name in names), "best"]]
    for size in sizes:
        found = {
            each.algorithm: each for each in costs(collective, size, topology, algorithms=names)
        }
        times = [f"{found[name].time_s * 1e6:.1f}" for name in names]
        lines.append([format_bytes(size), *times, next(iter(found))])
    return format_lines(lines)


def format_bytes(num_bytes: float) -> str:
    """Return a size in the largest unit of which there is at least one: "64 KiB"."""
    unit = 0
    while num_bytes >= 1024 and unit + 1 < len(_UNITS):
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:.4g} {_UNITS[unit]}"


def format_lines(lines: Sequence[Sequence[str]]) -> str:
    """Return cells in columns, set to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _algorithms(collective: str) -> Mapping[str, PhasesOf]:
    found = ALGORITHMS.get(collective)
    if found is None:
        near = difflib.get_close_matches(str(collective), ALGORITHMS, n=1, cutoff=0.0)[0]
        raise UsageError(
            f"no costs of {collective!r} are known, did you mean {near!r}? Known: "
            f"{', '.join(ALGORITHMS)}"
        )
    return found


def _algorithm(collective: str, algorithm: str) -> PhasesOf:
    found = _algorithms(collective).get(algorithm)
    if found is None:
        raise UsageError(
            f"{collective} has no algorithm {algorithm!r}; it has {_names(collective)}"
        )
    return found


def _names(collective: str) -> str:
    return ", ".join(_algorithms(collective))


def _check_size(num_bytes: float) -> None:
    if not (num_bytes >= 0 and math.isfinite(num_bytes)):
        raise UsageError(f"num_bytes={num_bytes!r} must be finite and at least 0")
