"""Sets of data positions: which parts of the stream a batch held, and which are left out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from trainwright.stability_guards.errors import GuardError


def _merged(spans: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in spans):
        if start < 0 or stop < start:
            raise GuardError(
                f"a span of data positions must be 0 <= start <= stop, got [{start}, {stop})"
            )
        if start == stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


@attrs.frozen
class Positions:
    """A set of global data positions, the same on every rank and whatever the layout.

    A position counts what the reader yields in its global order: sequences, or whole batches where
    their size never changes. Kept as sorted spans [start, stop), however they are given.

    Raises:
        GuardError: a span is not 0 <= start <= stop.
    """

    spans: tuple[tuple[int, int], ...] = attrs.field(default=(), converter=_merged)

    def __contains__(self, position: int) -> bool:
        place = bisect_right(self.spans, (position, float("inf"))) - 1
        return place >= 0 and self.spans[place][0] <= position < self.spans[place][1]

    def __or__(self, other: Positions) -> Positions:
        return Positions((*self.spans, *other.spans))

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __str__(self) -> str:
        if not self.spans:
            return "none"
        return ", ".join(f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in self.spans)

    @property
    def count(self) -> int:
        """How many positions there are."""
        return sum(stop - start for start, stop in self.spans)

    def from_position(self, start: int) -> Positions:
        """Return those that are not before ``start``."""
        return Positions((max(a, start), b) for a, b in self.spans if b > start)

    def before(self, stop: int) -> Positions:
        """Return those before ``stop``."""
        return Positions((a, min(b, stop)) for a, b in self.spans if a < stop)

    def draw(self, position: int, count: int) -> tuple[Positions, int]:
        """Return the next ``count`` positions that are not in this set, which is to be left out.

        Args:
            position: where reading stands.
            count: size of the batch.

        Returns:
            The positions to read, and where reading stands then.
        """
        found: list[tuple[int, int]] = []
        place = bisect_right(self.spans, (position, float("inf"))) - 1
        if place >= 0 and self.spans[place][1] > position:
            position = self.spans[place][1]
        place += 1
        while count > 0:
            ends = self.spans[place] if place < len(self.spans) else None
            stop = position + count if ends is None else min(position + count, ends[0])
            found.append((position, stop))
            count -= stop - position
            position = stop
            if ends is not None and stop == ends[0] and count > 0:
                position = ends[1]
                place += 1
        return Positions(found), position

    def as_json(self) -> list[list[int]]:
        """Return plain data that `from_json` reads."""
        return [[start, stop] for start, stop in self.spans]

    @classmethod
    def from_json(cls, data: Any) -> Positions:
        """Return the set that `as_json` gave, or one of a list of spans and single positions.

        Raises:
            GuardError: the data is something else.
        """
        if not isinstance(data, list):
            raise GuardError(f"data positions must be a list, got {type(data).__name__}")
        spans = []
        for entry in data:
            pair = [entry, entry + 1] if type(entry) is int else entry
            if not (isinstance(pair, list) and [type(v) for v in pair] == [int, int]):
                raise GuardError(
                    f"data positions must be whole numbers or [start, stop], got {entry!r}"
                )
            spans.append(pair)
        return cls(spans)
