"""Who needs which keys of whom, and what is computed with them, as data."""

from __future__ import annotations

from collections.abc import Sequence

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

_PIECES = 16
_LEAST = 512


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
        piece: int | None = None,
    ) -> RingPlan:
        """Return the plan of a rank.

        Args:
            queries: By rank, the ranges of positions of its queries, in its order.
            keys: By rank, those of its keys.
            rank: The rank.
            causal: Whether a position sees none after itself.
            documents: Which positions see each other at all; None: all.
            piece: How many keys of another rank are worked on at once, the same on all ranks; None:
                a sixteenth of what a rank has, at least 512.
        """
        ranks = len(keys)
        longest = max(map(count, keys))
        most = max(_LEAST, -(-longest // _PIECES)) if piece is None else piece
        edges = range(0, longest, most)

        asking = [segments_of(ranges, documents) for ranges in queries]
        asked = [segments_of(ranges, documents) for ranges in keys]

        def seen(user: int, owner: int) -> tuple[Span, ...]:
            return spans_of_segments(asking[user], asked[owner], causal)

        steps = [RingStep(rank, None, rank, None, seen(rank, rank))]
        for step in range(1, ranks):
            owner, user = (rank - step) % ranks, (rank + step) % ranks
            mine, theirs = seen(rank, owner), seen(user, rank)
            # As many steps on every rank, needed or not: messages of one step must not meet those
            # of another on the other side.
            for edge in edges:
                taken, spans = _piece(mine, edge, edge + most)
                given, _ = _piece(theirs, edge, edge + most)
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


def _piece(spans: tuple[Span, ...], first: int, last: int) -> tuple[Range | None, tuple[Span, ...]]:
    """Return which of some keys are seen, and what is seen of them, counted from the first seen."""
    inside = [part for span in spans for part in within_keys(span, first, last)]
    seen = hull_of_keys(inside)
    if seen is None:
        return None, ()
    shown = tuple(part for span in inside for part in within_keys(span, *seen))
    return (first + seen[0], first + seen[1]), shown
