"""The positions of each sequence that a context-parallel rank has, and attention over all."""

# Shapes: B batch, S sequence (a rank's part of it), H query heads, K key/value heads, E features.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.integration.model.packing import Packed
from trainwright.sharding.context import (
    ContextLayout,
    gathered_attention,
    hybrid_attention,
    hybrid_communicators,
    ring_attention,
    ulysses_attention,
)


class Attend(Protocol):
    """Causal attention over whole sequences, of which S may be a part."""

    def __call__(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        documents: Packed | None = None,
    ) -> torch.Tensor:
        """Return what the queries gather of the values [B, H, S, E].

        ``documents`` of the whole sequences do not see each other; None: each is one.
        """
        ...


ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "gathered": gathered_attention,
}
"""Ways to attend over the positions of all context-parallel ranks, by their option."""


@attrs.frozen(eq=False)
class SequencePart:
    """This rank's part of every sequence.

    Args:
        layout: Which positions each rank has.
        comm: The ranks that share a sequence.
    """

    layout: ContextLayout
    comm: Communicator

    @property
    def length(self) -> int:
        """Positions that this rank has."""
        return self.layout.sizes[self.comm.rank]

    def positions(self) -> torch.Tensor:
        """Return the positions that this rank has, int64 [S]."""
        return self.layout.positions(self.comm.rank, self.comm.device)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of what has whole sequences along its last dim."""
        return self.layout.split(whole, -1, self.comm.rank).contiguous()

    def attention(self, name: str) -> Attend:
        """Return causal attention of this rank's queries to the keys of all ranks.

        Args:
            name: One of `ATTENTIONS`, or ``hybrid``: heads are exchanged between neighbours, as
                many as `row_of` says, and keys go round between these rows.

        Communicates: With ``hybrid`` two splits of the ranks; what is returned does what the chosen
            attention does.
        """
        if name == "hybrid":
            grid = hybrid_communicators(self.comm, row_of(self.comm.size))
            attend = functools.partial(hybrid_attention, layout=self.layout, comm=grid)
        else:
            attend = functools.partial(ATTENTIONS[name], layout=self.layout, comm=self.comm)

        def attend_over_ranks(
            q_BHSE: torch.Tensor,
            k_BKSE: torch.Tensor,
            v_BKSE: torch.Tensor,
            documents: Packed | None = None,
        ) -> torch.Tensor:
            known = None if documents is None else documents.documents
            return attend(q_BHSE, k_BKSE, v_BKSE, documents=known)

        return attend_over_ranks


def row_of(size: int) -> int:
    """Return the greatest divisor of ``size`` up to its square root."""
    return max(row for row in range(1, math.isqrt(size) + 1) if size % row == 0)
