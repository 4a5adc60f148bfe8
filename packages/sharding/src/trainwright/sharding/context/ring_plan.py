"""Who needs which keys of whom, and what is computed with them, as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from trainwright.sharding.context.documents import Documents
from trainwright.sharding.context.spans import (
    Span,
    hull_of_keys,
    segments_of,
    spans_of_segments,
    within_keys,
)
from trainwright.sharding.context.time_order import Range, count, size
from trainwright.sharding.tensor.cuts import Ranges

_PIECES = 8
_LEAST = 1024


@attrs.frozen
class RingStep:
    """One rank's part of a step, in which each rank works on keys of another.

    Args:
        owner: Whose keys and values are worked on.
        taken: Which of the owner's, counted there; None where nothing is left that is visible.
        user: Who works on this rank's keys and values meanwhile.
        given: Which of this rank's; None: none.
        spans: What this rank's queries see of the keys taken, which are counted from the first
            taken.
    """

    owner: int
    taken: Range | None
    user: int
    given: Range | None
    spans: tuple[Span, ...]


@attrs.frozen
class RingPlan:
    """What one rank does in ring attention.

    A rank works on its own keys and values first, then on those of the rank before it, and so on,
    each in pieces. All ranks make their plans from the same data, so that what one gives is what
    another takes.

    Args:
        steps: The first is on all of the rank's own keys.
    """

    steps: tuple[RingStep, ...]

    @classmethod
    def of(
        cls,
        queries: Sequence[Ranges],
        keys: Sequence[Ranges],
        rank: int,
        *,
        causal: bool,
        documents: Documents | None = None,
        pieces: int | None = None,
    ) -> RingPlan:
        """Return the plan of a rank.

        Args:
            queries: By rank, the ranges of positions of its queries, in its order.
            keys: By rank, those of its keys.
            rank: The rank.
            causal: Whether a position sees none after itself.
            documents: Which positions see each other at all; None: all.
            pieces: In how many the keys of another rank are worked on, the same number on all
                ranks; None: in eight, or fewer where they would have less than 1024 keys.
        """
        ranks = len(keys)
        if pieces is None:
            pieces = min(_PIECES, -(-max(map(count, keys)) // _LEAST))
        asking = [segments_of(ranges, documents) for ranges in queries]
        asked = [segments_of(ranges, documents) for ranges in keys]

        def seen(user: int, owner: int) -> tuple[Span, ...]:
            return spans_of_segments(asking[user], asked[owner], causal)

        steps = [RingStep(rank, None, rank, None, seen(rank, rank))]
        for step in range(1, ranks):
            owner, user = (rank - step) % ranks, (rank + step) % ranks
            mine = _pieces(seen(rank, owner), pieces)
            theirs = _pieces(seen(user, rank), pieces)
            for (taken, spans), (given, _) in zip(mine, theirs, strict=True):
                steps.append(RingStep(owner, taken, user, given, spans))
        return cls(tuple(steps))

    @property
    def area(self) -> int:
        """How many pairs of a query and a key the rank computes, where all sequences are alike."""
        return sum(span.area for step in self.steps for span in step.spans)

    @property
    def num_taken(self) -> int:
        """How many keys of other ranks come here."""
        return sum(size(step.taken) for step in self.steps if step.taken)


def _pieces(
    spans: tuple[Span, ...], pieces: int
) -> Iterator[tuple[Range | None, tuple[Span, ...]]]:
    """Cut the keys that are seen into so many pieces; yield them and what is seen of each.

    There are as many on every rank, needed or not: a rank that takes little and one that takes much
    go in step, and messages of one step do not meet those of another on the other side.
    """
    first, last = hull_of_keys(spans) or (0, 0)
    for index in range(pieces):
        start, stop = (first + (last - first) * at // pieces for at in (index, index + 1))
        inside = [part for span in spans for part in within_keys(span, start, stop)]
        seen = hull_of_keys(inside)
        if seen is None:
            yield None, ()
            continue
        shown = tuple(part for span in inside for part in within_keys(span, *seen))
        yield (start + seen[0], start + seen[1]), shown
