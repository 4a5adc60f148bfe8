"""Attention by heads within groups of ranks and in a ring between them."""

# Shapes: B batch, H query heads, K key/value heads, S positions of this rank, E size of a head.

from __future__ import annotations

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.context.checks import check_attention
from trainwright.sharding.context.documents import Documents, documents_of
from trainwright.sharding.context.head_exchange import HeadExchange
from trainwright.sharding.context.head_shares import share_heads
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.ring import ring_of_plan
from trainwright.sharding.context.ring_plan import RingPlan
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.tensor.cuts import Cut, Ranges


def hybrid_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    comm: tuple[Communicator, Communicator],
    documents: torch.Tensor | Documents | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the whole sequence, by heads and in a ring.

    The ranks of the layout are a grid: those of one row share heads of the row's positions, where
    links are fast, and the keys and values of a row's heads go round between rows.

    Args:
        q: As in `ring_attention`, and so are all others but ``comm``.
        k: See there.
        v: See there.
        layout: See there; rank r of it is in row r // ulysses.size and column r % ulysses.size.
        comm: The ring of this rank's column, and the ulysses ranks of its row, as
            `hybrid_communicators` returns them.
        documents: See there.
        causal: See there.
        scale: See there.

    Returns:
        As `ring_attention`.

    Raises:
        ShardingError: As `ring_attention`.

    Communicates:
        That of `ulysses_attention` within a row, that of `ring_attention` within a column with
        K / ulysses.size key/value heads and the positions of a row (one head at least).
    """
    ring, ulysses = comm
    known = documents_of(documents)
    check_attention(q, k, v, layout, (ring, ulysses), known)
    held = [_row(layout, row, ulysses.size) for row in range(ring.size)]
    rows = [_in_time_order(ranges, layout.length) for ranges in held]
    shares = [share_heads(q.shape[1], k.shape[1], row, ulysses.size) for row in rows]
    exchange = HeadExchange(ulysses, held[ring.rank], shares[ring.rank])
    own_q, row_k, row_v = exchange.enter(q, k, v)
    queries = tuple(of_row[ulysses.rank].queries for of_row in shares)
    plan = (known or layout).memo.once(
        ("ring", queries, tuple(rows), ring.rank, causal),
        lambda: RingPlan.of(queries, rows, ring.rank, causal=causal, documents=known),
    )
    return exchange.leave(ring_of_plan(own_q, row_k, row_v, plan, ring, scale))


def hybrid_communicators(
    comm: Communicator, ulysses_size: int
) -> tuple[Communicator, Communicator]:
    """Split the ranks of a sequence into a grid for `hybrid_attention`.

    Args:
        comm: The ranks of the sequence, in the order of the layout.
        ulysses_size: How many neighbours share heads; it divides their number.

    Returns:
        The ring of this rank's column, and the ulysses ranks of its row.

    Raises:
        ShardingError: The size does not divide the number of ranks.

    Communicates:
        Two splits.
    """
    if ulysses_size < 1 or comm.size % ulysses_size:
        raise ShardingError(
            f"ulysses_size must divide the {comm.size} ranks of {comm.name!r}, got {ulysses_size}"
        )
    ring = comm.split(comm.rank % ulysses_size, comm.rank)
    ulysses = comm.split(comm.rank // ulysses_size, comm.rank)
    assert ring is not None, "every rank has a color"
    assert ulysses is not None, "every rank has a color"
    return ring, ulysses


def _row(layout: ContextLayout, row: int, size: int) -> tuple[Ranges, ...]:
    return layout.ranges[row * size : (row + 1) * size]


def _in_time_order(held: tuple[Ranges, ...], length: int) -> Ranges:
    """Return the positions of several ranks as increasing ranges, neighbours joined."""
    return Cut(length, [sorted(ends for ranges in held for ends in ranges)]).ranges[0]
