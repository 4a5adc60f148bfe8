"""What all ways to share attention ask of their arguments, before anything moves."""

from __future__ import annotations

import torch

from trainwright.collectives import Communicator
from trainwright.sharding.context.attend import check_tensors
from trainwright.sharding.context.documents import Documents
from trainwright.sharding.context.layout import ContextLayout
from trainwright.sharding.errors import ShardingError


def check_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: ContextLayout,
    comm: Communicator,
    documents: Documents | None,
) -> None:
    """Raise if the ranks, the layout, the documents and this rank's tensors do not fit.

    Raises:
        ShardingError: They do not.
    """
    if layout.size != comm.size:
        raise ShardingError(
            f"the layout is for {layout.size} ranks and {comm.name!r} has {comm.size}; make it "
            f"with size={comm.size}"
        )
    if documents is not None and documents.length != layout.length:
        raise ShardingError(
            f"documents are of whole sequences, here {layout.length} positions, got "
            f"{documents.length}; make them before sequences are split"
        )
    check_tensors(q, k, v)
    if documents is not None and len(documents.rows) != q.shape[0]:
        raise ShardingError(
            f"documents are of {len(documents.rows)} sequences and q of {q.shape[0]}; pass those "
            "of this micro-batch"
        )
    here = layout.sizes[comm.rank]
    if q.shape[2] != here or k.shape[2] != here:
        raise ShardingError(
            f"rank {comm.rank} holds {here} of {layout.length} positions under {layout}, got q "
            f"with {q.shape[2]} and k with {k.shape[2]} in dim 2"
        )
