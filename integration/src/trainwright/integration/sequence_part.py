"""The positions of each sequence that a context-parallel rank has, and attention over all."""

# Shapes: B batch, S sequence (a rank's part of it), H query heads, K key/value heads, E features.

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.sharding.context import (
    ContextLayout,
    gathered_attention,
    ring_attention,
    ulysses_attention,
)

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
        attention: One of `ATTENTIONS`.
    """

    layout: ContextLayout
    comm: Communicator
    attention: str = "ring"

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

    def has(self, position: int) -> bool:
        """Return whether a position is one of this rank's."""
        return position in self.layout.positions(self.comm.rank)

    def attend(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention of this rank's queries to the keys of all ranks, [B, H, S, E].

        Communicates: what the chosen attention does, over the ranks that share a sequence.
        """
        attend = ATTENTIONS[self.attention]
        return attend(q_BHSE, k_BKSE, v_BKSE, layout=self.layout, comm=self.comm)
