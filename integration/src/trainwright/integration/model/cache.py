"""Keys and values of the positions a stage has read, kept so that a new one costs one position."""

# Shapes: B batch, S sequence, T positions read, H query heads, K key/value heads, E head features.

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from trainwright.integration.model.packing import Packed, attend_causally
from trainwright.integration.sequence_part import Attend


class KeyValueCache:
    """Causal attention that remembers: an `Attend` for the layers of one stage.

    Each forward of the stage calls it once a layer, in their order; `begin` comes before. What a
    layer's keys and values need is allocated once, at its first call: [B, K, S, E] twice, where S
    is ``capacity`` and K this rank's key/value heads.

    Args:
        capacity: Positions that fit.
        whole: Attention over whole sequences, where nothing has been read before.
    """

    def __init__(self, capacity: int, whole: Attend = attend_causally) -> None:
        self.capacity = capacity
        self._whole = whole
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._places: tuple[int, ...] = ()
        self._layer = 0

    def begin(self, places: Sequence[int]) -> None:
        """Say where the first position of each row stands that the next forward brings.

        All zero forgets what has been read. Otherwise each row brings one position, and sees those
        of its own row before it.
        """
        self._places = tuple(places)
        self._layer = 0

    def __call__(
        self,
        q_BHSE: torch.Tensor,
        k_BKSE: torch.Tensor,
        v_BKSE: torch.Tensor,
        documents: Packed | None = None,
    ) -> torch.Tensor:
        """Return what the queries see [B, H, S, E], and keep the keys and values.

        Each row is one document, whatever ``documents`` says.
        """
        keys_BKTE = self._keep(self._keys, k_BKSE)
        values_BKTE = self._keep(self._values, v_BKSE)
        self._layer += 1
        if not any(self._places):
            return self._whole(q_BHSE, k_BKSE, v_BKSE)
        return F.scaled_dot_product_attention(
            q_BHSE,
            keys_BKTE,
            values_BKTE,
            attn_mask=self._visible(keys_BKTE),
            enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1],
        )

    def _keep(self, kept: list[torch.Tensor], new_BKSE: torch.Tensor) -> torch.Tensor:
        """Write a layer's new keys or values at their places; return all read so far."""
        rows, heads, length, features = new_BKSE.shape
        if self._layer == len(kept):
            kept.append(new_BKSE.new_zeros(rows, heads, self.capacity, features))
        whole = kept[self._layer]
        if len(set(self._places)) == 1:
            start = self._places[0]
            whole[:, :, start : start + length] = new_BKSE
        else:
            places_B = torch.tensor(self._places, device=new_BKSE.device)
            whole[torch.arange(rows, device=new_BKSE.device), :, places_B] = new_BKSE[:, :, 0]
        return whole[:, :, : max(self._places) + length]

    def _visible(self, keys_BKTE: torch.Tensor) -> torch.Tensor | None:
        """Return which keys each row sees [B, 1, 1, T]; None where all rows see all."""
        if len(set(self._places)) == 1:
            return None
        device = keys_BKTE.device
        last_B = torch.tensor(self._places, device=device)
        return torch.arange(keys_BKTE.shape[2], device=device) <= last_B[:, None, None, None]
