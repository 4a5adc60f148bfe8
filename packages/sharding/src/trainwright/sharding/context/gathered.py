"""Attention with all keys and values gathered: simplest, and the least messages."""

# Shapes: B batch, H query heads, K key/value heads, S positions (all of them, or a rank's), E, F
# sizes of a head of the keys and of the values.

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainwright.collectives import Communicator, differentiable
from trainwright.sharding.context.attend import attend
from trainwright.sharding.context.checks import check_attention
from trainwright.sharding.context.documents import Documents, documents_of
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.context.spans import spans_between


def gathered_attention(
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
    """Return the attention of this rank's queries to the whole sequence, gathered on every rank.

    Keys and values of the whole sequence live on each rank until the backward is over; with few
    key/value heads that is little, and there is one message to wait for instead of one a rank.

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
        As `ring_attention`.

    Raises:
        ShardingError: As `ring_attention`.

    Communicates:
        Forward one all-gather of keys and values, of size - 1 times the largest part a rank;
        backward one reduce-scatter of their gradients.
    """
    known = documents_of(documents)
    check_attention(q, k, v, layout, comm, known)
    whole_k, whole_v = _gather(k, v, layout, comm)
    mine, whole = layout.ranges[comm.rank], ((0, layout.length),)
    spans = (known or layout).memo.once(
        ("spans", mine, whole, causal),
        lambda: spans_between(mine, whole, causal=causal, documents=known),
    )
    return attend(q, whole_k, whole_v, spans, scale=scale)[0]


def _gather(
    k: torch.Tensor, v: torch.Tensor, layout: ContextLayout, comm: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_SBKE = torch.cat([k, v], -1).movedim(2, 0)
    most = max(layout.sizes)
    missing = most - rows_SBKE.shape[0]
    padded = F.pad(rows_SBKE, (0, 0, 0, 0, 0, 0, 0, missing)) if missing else rows_SBKE
    gathered = differentiable.shard_to_partial(padded, comm, 0)
    parts = [gathered[r * most : r * most + size] for r, size in enumerate(layout.sizes)]
    whole = layout.join(parts, 0).movedim(0, 2)
    return whole[..., : k.shape[-1]], whole[..., k.shape[-1] :]
