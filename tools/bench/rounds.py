"""Interleaved rounds and the ratios that are taken within them.

Absolute times move with the machine; two contestants that run one after the other in the same
round see the same machine, so only the ratio within a round says anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import attrs


@attrs.frozen
class Spread:
    """A median with the smallest and the largest value behind it."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def format(self, digits: int = 2) -> str:
        """Return ``median [smallest..largest]``."""
        median, smallest, largest = (
            f"{value:.{digits}f}" for value in (self.median, self.smallest, self.largest)
        )
        return f"{median} [{smallest}..{largest}]"


def interleave(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the order of each round: everybody once, the first of a round last in the next.

    So nobody always runs after the same one that left its memory in the caches.
    """
    names = tuple(names)
    for number in range(rounds):
        start = number % len(names)
        yield names[start:] + names[:start]


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return for each round the time of the rank that needed longest: that of the job."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def ratios(times: Sequence[float], reference: Sequence[float]) -> Spread:
    """Return the spread of the ratios of two contestants, each taken within one round."""
    return Spread.of([mine / other for mine, other in zip(times, reference, strict=True)])
