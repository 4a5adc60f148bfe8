"""Pairwise covering arrays: few rows in which every pair of values that is possible occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
Refuse = Callable[[Row], str | None]
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with a value each, in the order of the factors."""


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the pairs that occur in a row."""
    return itertools.combinations(row.items(), 2)


def all_pairs(factors: Factors) -> Iterator[Pair]:
    """Yield every pair of values of two factors."""
    for (one, values), (other, others) in itertools.combinations(factors.items(), 2):
        for value, another in itertools.product(values, others):
            yield (one, value), (other, another)


class Cover:
    """A greedy search for few rows.

    A pair that no row holds yet is put into a row that is not refused, found among those that
    differ little from known ones; the other values of that row are then changed as long as it
    holds more such pairs for it.

    Args:
        factors: values of each, the plainest first.
        refuse: why there is no such row; None where there is.
        needed: factors whose plainest value is refused beside some values of others, so that
            another one of theirs may let these in; the plainest values of all others never are.
        changes: how many of them may differ from the plainest before a pair is given up.
        seed: of the random choices.
    """

    def __init__(
        self,
        factors: Factors,
        refuse: Refuse,
        *,
        needed: Iterable[str],
        changes: int = 3,
        seed: int = 0,
    ) -> None:
        self.factors = factors
        self.refuse = refuse
        self.needed = tuple(needed)
        self.changes = changes
        self.random = random.Random(seed)
        self.plainest = {name: values[0] for name, values in factors.items()}
        self.rows: list[Row] = []
        self.impossible: list[Pair] = []
        self.open: set[Pair] = set()

    def run(self, known: Iterable[Mapping[str, str]] = ()) -> list[Row]:
        """Return the rows; pairs that were given up are in `impossible`.

        Args:
            known: rows to begin with, also of fewer or other factors; so that an array changes
                little where its factors do. Those that are refused now are left out.
        """
        left = list(all_pairs(self.factors))
        self.open = set(left)
        for row in known:
            self._keep(row)
        self.random.shuffle(left)
        for pair in left:
            if pair not in self.open:
                continue
            row = self.completed(pair)
            if row is None:
                self.open.discard(pair)
                self.impossible.append(pair)
                continue
            row = self._improved(row, pair)
            self.open -= set(pairs_of(row))
            self.rows.append(row)
        self.rows = without_redundant(self.rows)
        order = {pair: number for number, pair in enumerate(all_pairs(self.factors))}
        self.impossible.sort(key=order.__getitem__)
        return self.rows

    def _keep(self, known: Mapping[str, str]) -> None:
        """Take a known row over; factors that are new to it get what holds most open pairs."""
        kept = {n: v for n, v in known.items() if v in self.factors.get(n, ())}
        row = {name: kept.get(name, plain) for name, plain in self.plainest.items()}
        if self.refuse(row) is not None:
            return
        for name in row.keys() - kept.keys():
            others = [{**row, name: value} for value in self.factors[name]]
            row = max((r for r in others if self.refuse(r) is None), key=self._gain)
        self.open -= set(pairs_of(row))
        self.rows.append(row)

    def completed(self, pair: Pair) -> Row | None:
        """Return a row with the pair that is not refused, near one that is known."""
        for base in reversed(self.rows[-200:]):
            row = {**base, **dict(pair)}
            if self.refuse(row) is None:
                return row
        base = {**self.plainest, **dict(pair)}
        others = [name for name in self.needed if name not in dict(pair)]
        for number in range(self.changes + 1):
            for names in itertools.combinations(others, number):
                for values in itertools.product(*(self.factors[name][1:] for name in names)):
                    row = {**base, **dict(zip(names, values, strict=True))}
                    if self.refuse(row) is None:
                        return row
        return None

    def _improved(self, row: Row, pair: Pair) -> Row:
        best, best_gain = row, self._gain(row)
        for _ in range(4):
            found, gain = self._climbed(dict(row), pair)
            if gain > best_gain:
                best, best_gain = found, gain
        return best

    def _climbed(self, row: Row, pair: Pair) -> tuple[Row, int]:
        fixed = dict(pair)
        names = [name for name in self.factors if name not in fixed]
        gain, stuck = self._gain(row), 0
        while stuck < 3:
            stuck += 1
            self.random.shuffle(names)
            for name in names:
                for value in self.random.sample(self.factors[name], len(self.factors[name])):
                    better = {**row, name: value}
                    found = self._gain(better)
                    if found > gain and self.refuse(better) is None:
                        row, gain, stuck = better, found, 0
            for _ in range(60):
                some = self.random.sample(names, self.random.choice((2, 3)))
                changes = {name: self.random.choice(self.factors[name]) for name in some}
                better = {**row, **changes}
                found = self._gain(better)
                if found >= gain and self.refuse(better) is None:
                    stuck = stuck if found == gain else 0
                    row, gain = better, found
        return row, gain

    def _gain(self, row: Row) -> int:
        return sum(pair in self.open for pair in pairs_of(row))


def without_redundant(rows: Sequence[Row]) -> list[Row]:
    """Return the rows but for those whose pairs all occur in the others."""
    counts: dict[Pair, int] = {}
    for row in rows:
        for pair in pairs_of(row):
            counts[pair] = counts.get(pair, 0) + 1
    kept = []
    for row in rows:
        if all(counts[pair] > 1 for pair in pairs_of(row)):
            for pair in pairs_of(row):
                counts[pair] -= 1
        else:
            kept.append(row)
    return kept
