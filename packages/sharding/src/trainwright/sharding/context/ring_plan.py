"""Who needs which keys of whom, and what is computed with them, as data."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trainwright.sharding.context.documents import Documents
from trainwright.sharding.context.spans import (
    Span,
    hull_of_keys,
    shift_keys,
    spans_between,
)
from trainwright.sharding.context.time_order import Range
from trainwright.sharding.tensor.cuts import Ranges


@attrs.frozen
class RingStep:
    """One rank's part of a step, in which each rank works on the block of another.

    Args:
        owner: Whose keys and values are worked on.
        taken: Which of the owner's are needed, counted there; None where nothing is visible.
        user: Who works on this rank's keys and values meanwhile.
        given: Which of this rank's they need; None: none.
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

    In step i a rank works on the keys and values of the rank i before it, beginning with its own.
    All ranks make their plans from the same data, so that what one gives is what another takes.

    Args:
        steps: As many as ranks, the first on the rank's own block.
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
    ) -> RingPlan:
        """Return the plan of a rank.

        Args:
            queries: By rank, the ranges of positions of its queries, in its order.
            keys: By rank, those of its keys.
            rank: The rank.
            causal: Whether a position sees none after itself.
            documents: Which positions see each other at all; None: all.
        """
        size = len(keys)

        def seen(user: int, owner: int) -> tuple[Span, ...]:
            return spans_between(queries[user], keys[owner], causal=causal, documents=documents)

        steps = []
        for step in range(size):
            owner, user = (rank - step) % size, (rank + step) % size
            spans = seen(rank, owner)
            taken = hull_of_keys(spans) if step else None
            given = hull_of_keys(seen(user, rank)) if step else None
            if taken is not None:
                spans = tuple(shift_keys(span, -taken[0]) for span in spans)
            steps.append(RingStep(owner, taken, user, given, spans))
        return cls(tuple(steps))

    @property
    def area(self) -> int:
        """How many pairs of a query and a key the rank computes, where all sequences are alike."""
        return sum(span.area for step in self.steps for span in step.spans)

    @property
    def num_taken(self) -> int:
        """How many keys of other ranks come here."""
        return sum(step.taken[1] - step.taken[0] for step in self.steps if step.taken)


def ring_plan(
    queries: tuple[Ranges, ...],
    keys: tuple[Ranges, ...],
    rank: int,
    causal: bool,
    documents: Documents | None,
) -> RingPlan:
    """Return a rank's plan, made once for all layers that are given the same `Documents`."""

    def compute() -> RingPlan:
        return RingPlan.of(queries, keys, rank, causal=causal, documents=documents)

    key = ("ring", queries, keys, rank, causal)
    return compute() if documents is None else documents.once(key, compute)
