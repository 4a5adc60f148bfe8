"""Weighted mixtures: how many samples of each source any number of samples holds, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from fractions import Fraction

import attrs
import numpy as np

from trainwright.integration.data.protocol import Samples, Sequence
from trainwright.integration.errors import ConfigError

LONGEST = 100_000
"""Samples after which a mixture repeats, at most."""


@attrs.frozen(eq=False)
class Turns:
    """Which source each sample is of, by its position.

    Of the first n samples source k has less than one more or less than n times its share.

    Args:
        sources: int64 [P], the source of each sample of a period.
        before: int64 [P], how many samples of that source the period has before it.
        counts: int64 [K], how many of each source the period has.
    """

    sources: np.ndarray
    before: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, weights: Several[Fraction]) -> Turns:
        """Share turns out by weights.

        Each source's j-th sample has the window between the moment that its share exceeds j - 1
        and the one that it reaches j; at each turn, among the sources whose window is open, the one
        takes it whose window closes first.

        Raises:
            ConfigError: a weight is not positive, or the ratios need too long a period.

        Source:
            Baruah, Cohen, Plaxton, Varvel: Proportionate progress (Algorithmica 1996), for one
            resource.
        """
        if any(weight <= 0 for weight in weights):
            raise ConfigError(f"weights of data must be positive, got {_shown(weights)}")
        scale = math.lcm(*(weight.denominator for weight in weights))
        numbers = [int(weight * scale) for weight in weights]
        common = math.gcd(*numbers)
        shares = [number // common for number in numbers]
        period = sum(shares)
        if period > LONGEST:
            raise ConfigError(
                f"weights of data {_shown(weights)} have ratios of a period of {period} samples, "
                f"more than {LONGEST}; write them with fewer digits"
            )
        sources, before = np.zeros(period, np.int64), np.zeros(period, np.int64)
        taken = [0] * len(shares)
        for turn in range(period):
            open_ones = [k for k, a in enumerate(shares) if taken[k] * period < (turn + 1) * a]
            # The next sample of k is late after the turn ceil((taken + 1) * period / share).
            chosen = min(open_ones, key=lambda k: -(-(taken[k] + 1) * period // shares[k]))
            sources[turn], before[turn] = chosen, taken[chosen]
            taken[chosen] += 1
        return cls(sources, before, np.array(shares))

    def place(self, position: int) -> tuple[int, int]:
        """Return the source of a sample, and which one of that source it is."""
        periods, turn = divmod(position, len(self.sources))
        source = int(self.sources[turn])
        return source, periods * int(self.counts[source]) + int(self.before[turn])

    def prefix(self, count: int) -> list[int]:
        """Return how many of the first ``count`` samples are of each source."""
        periods, turns = divmod(count, len(self.sources))
        found = np.bincount(self.sources[:turns], minlength=len(self.counts))
        return [int(number) for number in found + periods * self.counts]


class Mixture:
    """Samples of several sources in turn, each of which goes on by itself.

    Args:
        samples: of each source.
        weights: of each source, relative to each other.

    Raises:
        ConfigError: a weight is not positive, or the ratios need too long a period.
    """

    def __init__(self, samples: Several[Samples], weights: Several[Fraction]) -> None:
        self.samples = tuple(samples)
        self.turns = Turns.of(weights)

    def sample(self, position: int) -> Sequence:
        """Return the sample at a position of the run's order."""
        source, place = self.turns.place(position)
        return self.samples[source].sample(place)


def _shown(weights: Several[Fraction]) -> str:
    return ", ".join(str(float(weight)) for weight in weights)
