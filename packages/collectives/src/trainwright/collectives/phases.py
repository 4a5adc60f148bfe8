"""Messages one after another over one link, and tensors cut into chunks that follow each other."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from trainwright.collectives.topology import Link, Topology


@attrs.frozen
class Phase:
    """Messages of one size over one link, one after another.

    Args:
        steps: How many.
        bytes_per_step: The bytes of each.
        link: What they travel over.
        chunks: The pieces that a tree or a chain cuts the tensor, or its half, into; else 1.
    """

    steps: int
    bytes_per_step: float
    link: Link
    chunks: int = 1

    @property
    def time_s(self) -> float:
        """Seconds that the phase takes."""
        return self.steps * self.link.time_s(self.bytes_per_step)


@attrs.frozen
class Request:
    """What is to be costed: ``num_bytes`` is the large tensor of a rank, as in nccl-tests.

    ``chunks`` is None where the best number is to be taken; ``servers`` is for parameter servers.
    """

    num_bytes: float
    topology: Topology
    chunks: int | None = None
    servers: int = 1


Phases = tuple[Phase, ...]
PhasesOf = Callable[[Request], Phases]


def rounds(messages: int, topology: Topology) -> int:
    """Return how often a device must send, or receive, with all its ports."""
    return math.ceil(messages / topology.ports)


def pipelined(request: Request, first: int, each: int, *, parts: int = 1) -> Phases:
    """Return ``first`` messages for the first chunk and ``each`` for every further one.

    A chunk is ``K / parts / c``, at the best c where none is given.
    """
    if request.topology.size == 1:
        return ()
    link = request.topology.slowest_link
    num_bytes = request.num_bytes / parts
    chunks = request.chunks or best_chunks(num_bytes, link, first - each, each)
    return (Phase(first + each * (chunks - 1), num_bytes / chunks, link, chunks),)


def best_chunks(num_bytes: float, link: Link, fill: int, each: int) -> int:
    """Return the c at which ``(fill + each * c) * link.time_s(num_bytes / c)`` is least.

    A chunk has at least one byte.
    """
    limit = max(1, math.floor(num_bytes))
    if fill <= 0:
        return 1
    if link.latency_s == 0:
        return limit
    ideal = math.sqrt(fill * num_bytes / (each * link.latency_s * link.bytes_per_s))
    around = {min(max(1, math.floor(ideal)), limit), min(max(1, math.ceil(ideal)), limit)}
    return min(around, key=lambda c: ((fill + each * c) * link.time_s(num_bytes / c), c))
