"""The positions of each sequence that a context-parallel rank has, and attention over all."""

# Shapes: B batch, S sequence (a rank's part of it), H query heads, K key/value heads, E features.

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.context import (
    ContextLayout,
    gathered_attention,
    hybrid_attention,
    hybrid_communicators,
    ring_attention,
    ulysses_attention,
)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From queries [B, H, S, E], keys and values [B, K, S, E] to what the queries see [B, H, S, E]."""

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
            return functools.partial(hybrid_attention, layout=self.layout, comm=grid)
        return functools.partial(ATTENTIONS[name], layout=self.layout, comm=self.comm)


def row_of(size: int) -> int:
    """Return the greatest divisor of ``size`` up to its square root."""
    return max(row for row in range(1, math.isqrt(size) + 1) if size % row == 0)
