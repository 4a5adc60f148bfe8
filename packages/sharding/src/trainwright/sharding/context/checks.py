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
    comm: Communicator | tuple[Communicator, Communicator],
    documents: Documents | None,
) -> None:
    """Raise if the ranks, the layout, the documents and this rank's tensors do not fit.

    Two communicators are the columns and the rows of a grid.

    Raises:
        ShardingError: They do not.
    """
    outer, inner = comm if isinstance(comm, tuple) else (comm, None)
    size, rank, name = outer.size, outer.rank, repr(outer.name)
    if inner is not None:
        size, rank, name = size * inner.size, rank * inner.size + inner.rank, "the grid"
    if layout.size != size:
        raise ShardingError(
            f"the layout is for {layout.size} ranks and {name} has {size}; make it with size={size}"
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
    here = layout.sizes[rank]
    if q.shape[2] != here or k.shape[2] != here:
        raise ShardingError(
            f"rank {rank} holds {here} of {layout.length} positions under {layout}, got q "
            f"with {q.shape[2]} and k with {k.shape[2]} in dim 2"
        )
