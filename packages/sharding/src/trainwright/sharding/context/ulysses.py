"""Attention by heads: an all-to-all turns parts of the sequence into heads, another one back."""

# Shapes: B batch, H query heads, K key/value heads, S positions of this rank, E size of a head.

from __future__ import annotations

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.context.attend import attend
from trainwright.sharding.context.checks import check_attention
from trainwright.sharding.context.documents import Documents, documents_of
from trainwright.sharding.context.head_exchange import HeadExchange
from trainwright.sharding.context.head_shares import share_heads
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.spans import spans_between


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: ContextLayout,
    comm: Communicator,
    documents: torch.Tensor | Documents | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's queries to the whole sequence, computed by heads.

    Each rank gets some heads of all positions. Where ranks outnumber heads, several share a head
    and each takes a balanced part of its queries; a key/value head goes to all ranks that need it.

    Args:
        q: As in `ring_attention`, and so are all others.
        k: See there.
        v: See there.
        layout: See there.
        comm: See there.
        documents: See there.
        causal: See there.
        scale: See there.

    Returns:
        As `ring_attention`. No factor of the number of ranks enters outputs or gradients.

    Raises:
        ShardingError: As `ring_attention`.

    Communicates:
        Two all-to-alls forward, of q, k, v and of the output, two backward: about
        (2 H + 2 K) / size heads of S_local positions to each other rank.

    Source:
        Jacobs et al. 2023, DeepSpeed Ulysses, §3.
    """
    known = documents_of(documents)
    check_attention(q, k, v, layout, comm, known)
    whole = ((0, layout.length),) if layout.length else ()
    shares = share_heads(q.shape[1], k.shape[1], whole, comm.size)
    exchange = HeadExchange(comm, layout.ranges, shares)
    own_q, all_k, all_v = exchange.enter(q, k, v)
    mine = shares[comm.rank].queries
    spans = (known or layout).memo.once(
        ("spans", mine, whole, causal),
        lambda: spans_between(mine, whole, causal=causal, documents=known),
    )
    return exchange.leave(attend(own_q, all_k, all_v, spans, scale=scale)[0])
