"""Which heads each rank computes where whole sequences are attended to, and for which queries."""

from __future__ import annotations

import attrs

from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.time_order import Range, count, positions_at
from trainwright.sharding.tensor.cuts import Cut, Ranges


@attrs.frozen
class HeadShare:
    """What one rank computes.

    Args:
        heads: Its range of query heads.
        kv_heads: The range of key/value heads that they need.
        queries: The positions of its queries, increasing; those of a part of the sequence where
            several ranks compute one head.
        repeats: By query head, the place among ``kv_heads`` of its key/value head; None where each
            serves equally many neighbours.
    """

    heads: Range
    kv_heads: Range
    queries: Ranges
    repeats: tuple[int, ...] | None


def share_heads(
    num_heads: int, num_kv_heads: int, positions: Ranges, ranks: int
) -> tuple[HeadShare, ...]:
    """Share heads out over ranks, and the queries of a head where ranks outnumber heads.

    Args:
        num_heads: Query heads.
        num_kv_heads: Key/value heads, each serving equally many neighbours.
        positions: Of all queries, increasing.
        ranks: How many compute.
    """
    group = num_heads // num_kv_heads
    shares = []
    for heads, queries in _work(num_heads, positions, ranks):
        first, last = heads[0] // group, (heads[1] - 1) // group + 1
        serving = tuple(head // group - first for head in range(*heads))
        counts = {serving.count(kv) for kv in range(last - first)}
        repeats = None if len(counts) == 1 else serving
        shares.append(HeadShare(heads, (first, last), queries, repeats))
    return tuple(shares)


def _work(num_heads: int, positions: Ranges, ranks: int) -> list[tuple[Range, Ranges]]:
    if num_heads >= ranks:
        return [(ranges[0], positions) for ranges in Cut.balanced(num_heads, ranks).ranges]
    found: list[tuple[Range, Ranges]] = []
    for head, sharing in enumerate(Cut.balanced(ranks, num_heads).sizes):
        layout = ContextLayout("zigzag", count(positions), sharing)
        found += [((head, head + 1), positions_at(positions, of_rank)) for of_rank in layout.ranges]
    return found
