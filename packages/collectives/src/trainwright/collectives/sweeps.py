"""Constants of a fabric from measured sweeps, and what they predict of others.

A transport that pipelines its rings takes, for s steps and V bytes over the slowest link,

    time = s * latency + ramp * sqrt(s * V) + V / bandwidth

The first and the last term are the α-β model. The middle one is what filling a pipeline of best
sized chunks costs: ``(s + c) * (a + V / c / b)`` is least at ``c = sqrt(s * V / (a * b))``, and is
then ``s * a + 2 * sqrt(s * V * a / b) + V / b``. Real protocols change with the size, so the three
constants are fitted freely, none below zero.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence

import attrs
import numpy as np

from trainwright.collectives.cost import (
    bus_bandwidth,
    busbw_factor,
    format_bytes,
    format_lines,
)
from trainwright.collectives.errors import UsageError
from trainwright.collectives.topology import Link

# Columns of the terms.
_STEPS, _RAMP, _VOLUME = range(3)
# (2/3)^60 of the first distance is left.
_ROUNDS = 60
# Points that are met exactly keep a weight.
_LEAST_ERROR = 1e-6


class Route(enum.Enum):
    """Where numbers are added, which says how steps and bytes depend on the ranks.

    RING: in the devices, as the tensor goes around. SWITCH (NVLS, SHARP): in the switch, to which
    each device sends its tensor once and from which it gets the sum once, however many there are.
    """

    RING = "ring"
    SWITCH = "switch"


@attrs.frozen
class Measurement:
    """One point of a sweep.

    Args:
        collective: As in `cost`.
        ranks: How many took part.
        num_bytes: Of the large tensor.
        time_s: Seconds that it took.
    """

    collective: str
    ranks: int
    num_bytes: float
    time_s: float

    def __attrs_post_init__(self) -> None:
        busbw_factor(self.collective, self.ranks)
        if self.ranks < 2 or not self.num_bytes > 0 or not self.time_s > 0:
            raise UsageError(f"a measurement needs two ranks, bytes and seconds, got {self}")

    @classmethod
    def of_bus_bandwidth(
        cls, collective: str, ranks: int, num_bytes: float, bytes_per_s: float
    ) -> Measurement:
        """Return the point of which nccl-tests printed the bus bandwidth (1 GB/s is 1e9)."""
        if not bytes_per_s > 0:
            raise UsageError(f"bytes_per_s={bytes_per_s!r} must be positive")
        factor = busbw_factor(collective, ranks)
        return cls(collective, ranks, num_bytes, num_bytes * factor / bytes_per_s)

    @property
    def bus_bytes_per_s(self) -> float:
        """The bus bandwidth in bytes a second, as nccl-tests prints it."""
        return bus_bandwidth(self.collective, self.ranks, self.num_bytes, self.time_s)


@attrs.frozen
class Fit:
    """Constants of a fabric.

    Args:
        route: Where numbers are added.
        latency_s: Seconds a step.
        ramp: Seconds for the square root of a step and a byte.
        bytes_per_s: Bandwidth of the slowest link, one way.
    """

    route: Route
    latency_s: float
    ramp: float
    bytes_per_s: float

    @property
    def link(self) -> Link:
        """The α-β part alone, to build a `Topology` of; small tensors then look cheaper."""
        return Link(self.latency_s, self.bytes_per_s)

    def time_s(self, collective: str, ranks: int, num_bytes: float) -> float:
        """Return the seconds that a collective is predicted to take."""
        steps, volume = _load(self.route, collective, ranks, num_bytes)
        return (
            steps * self.latency_s
            + self.ramp * math.sqrt(steps * volume)
            + volume / self.bytes_per_s
        )

    def error(self, measured: Measurement) -> float:
        """Return by what part of the measured time the prediction is above it."""
        predicted = self.time_s(measured.collective, measured.ranks, measured.num_bytes)
        return predicted / measured.time_s - 1

    def format_errors(self, measured: Sequence[Measurement]) -> str:
        """Return a table: a line a point, measured and predicted time and bus bandwidth."""
        lines = [["collective", "ranks", "size", "us", "GB/s", "predicted us", "GB/s", "error"]]
        for point in measured:
            time_s = self.time_s(point.collective, point.ranks, point.num_bytes)
            predicted = attrs.evolve(point, time_s=time_s)
            lines.append(
                [
                    point.collective,
                    str(point.ranks),
                    format_bytes(point.num_bytes),
                    f"{point.time_s * 1e6:.1f}",
                    f"{point.bus_bytes_per_s / 1e9:.1f}",
                    f"{time_s * 1e6:.1f}",
                    f"{predicted.bus_bytes_per_s / 1e9:.1f}",
                    f"{self.error(point):+.1%}",
                ]
            )
        return format_lines(lines)


def fit(measured: Sequence[Measurement], route: Route = Route.RING) -> Fit:
    """Return the constants with the least sum of the fourth powers of relative errors.

    Fourth powers, because a fabric is to be told within some error everywhere, yet no single odd
    point is to decide. Points of different collectives and numbers of ranks of one fabric may be
    given together: it is they that tell a cost by step from a cost by call. Transports change their
    protocols below about 1 MiB: leave smaller points out where only larger ones are to be told.

    Args:
        measured: At least two different sizes, of which one is large enough to show a bandwidth;
            with fewer than four, one constant or two are left at zero.
        route: Where numbers were added.

    Raises:
        UsageError: There are too few points, or time does not grow with the size.
    """
    num_sizes = len({point.num_bytes for point in measured})
    if num_sizes < 2:
        raise UsageError(
            f"{len(measured)} points do not tell latency from bandwidth; give two sizes or more"
        )
    terms = np.array([_terms(route, point) for point in measured])
    # Columns of one size, so that nearly dependent ones are judged alike.
    scale = terms.max(axis=0)
    constants, error = _fit_some(terms / scale, num_sizes - 1)
    same_time = np.array([[1 / point.time_s] for point in measured])
    if error >= _fit_all(same_time / same_time.max())[1]:
        raise UsageError(
            "the times do not grow with the size as those over a link do; give larger tensors"
        )
    latency_s, ramp, s_per_byte = (float(constant) for constant in constants / scale)
    return Fit(route, latency_s, ramp, 1 / s_per_byte)


def _fit_some(terms: np.ndarray, most: int) -> tuple[np.ndarray, float]:
    """Return the constants for which ``terms @ constants`` is nearest to ones, and how near.

    None is below zero and at most ``most`` are above, because as many as there are sizes would
    explain the noise instead of the fabric. With three of them, of which the bandwidth is always
    one, trying which are zero is all that an active-set method would do.
    """
    found, least = np.zeros(terms.shape[1]), math.inf
    for count in range(min(most, terms.shape[1])):
        for others in itertools.combinations((_STEPS, _RAMP), count):
            chosen = [*others, _VOLUME]
            solution, error = _fit_all(terms[:, chosen])
            if np.all(solution >= 0) and error < least:
                found, least = np.zeros(terms.shape[1]), error
                found[chosen] = solution
    return found, least


def _fit_all(terms: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the constants with the least sum of fourth powers of the errors, and that sum.

    Least squares again and again, weighted with the squares of the errors before; a third of the
    way each time, which is Newton's step for fourth powers.
    """
    ones = np.ones(len(terms))
    solution = np.linalg.lstsq(terms, ones, rcond=None)[0]
    for _ in range(_ROUNDS):
        weights = np.maximum(np.abs(terms @ solution - 1), _LEAST_ERROR)
        weighted = np.linalg.lstsq(terms * weights[:, None], weights, rcond=None)[0]
        solution = solution + (weighted - solution) / 3
    return solution, float(np.sum((terms @ solution - 1) ** 4))


def _terms(route: Route, point: Measurement) -> list[float]:
    """Return what the constants are multiplied by, in parts of the measured time."""
    steps, volume = _load(route, point.collective, point.ranks, point.num_bytes)
    return [term / point.time_s for term in (steps, math.sqrt(steps * volume), volume)]


def _load(route: Route, collective: str, ranks: int, num_bytes: float) -> tuple[float, float]:
    """Return steps one after another and bytes over the slowest link."""
    if route is Route.SWITCH:
        if collective != "all_reduce":
            raise UsageError(
                f"in the switch nothing is added for {collective}; fit it with Route.RING"
            )
        return 2, num_bytes
    volume = num_bytes * busbw_factor(collective, ranks)
    if collective in ("broadcast", "reduce"):
        return ranks - 1, volume
    return (2 if collective == "all_reduce" else 1) * (ranks - 1), volume
