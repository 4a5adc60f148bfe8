"""Multi-head latent attention: keys and values are made of a small vector that heads share."""

# Shapes: B batch, S sequence, D model, H heads, E features of a query or key, F of a value.
# A shard keeps its letters: on a tensor-parallel rank H is this rank's part.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.model.attention import split_heads
from trainwright.integration.model.latent_shape import LatentShape
from trainwright.integration.model.layers import Layers
from trainwright.integration.model.packing import Places
from trainwright.integration.model.rotary import turn
from trainwright.integration.model.shape import ModelShape


class LatentAttention(nn.Module):
    """Causal attention on a fused kernel with latent keys and values, and latent queries or not.

    A head's queries and keys have features that are turned by their positions and others that are
    not; the turned ones of keys are shared by all heads.

    Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1.
    """

    def __init__(self, shape: ModelShape, latent: LatentShape, layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        self.sizes = latent
        self.turn = turn_neighbours if latent.interleaved else turn
        # The kernel divides by the root of the features that it sees.
        self.factor = latent.score_factor * math.sqrt(latent.kernel_width / latent.key_width)
        heads, bias = shape.heads, shape.qkv_bias
        if latent.queries is None:
            self.q_proj = layers.column(
                shape.width, heads * latent.key_width, unit=latent.key_width
            )
            self.make_queries = self._straight_queries
        else:
            self.q_a_proj = layers.whole(shape.width, latent.queries, bias=bias)
            self.q_a_layernorm = layers.norm(latent.queries, latent.norm_epsilon)
            self.q_b_proj = layers.column(
                latent.queries, heads * latent.key_width, unit=latent.key_width
            )
            self.make_queries = self._latent_queries
        self.kv_a_proj_with_mqa = layers.whole(shape.width, latent.keys + latent.turned, bias=bias)
        self.kv_a_layernorm = layers.norm(latent.keys, latent.norm_epsilon)
        self.kv_b_proj = layers.column(
            latent.keys, heads * (latent.plain + latent.values), unit=latent.plain + latent.values
        )
        self.o_proj = layers.row(
            heads * latent.values, shape.width, unit=latent.values, bias=shape.output_bias
        )

    def forward(self, hidden_BSD: torch.Tensor, places: Places) -> torch.Tensor:
        """Return the attention output [B, S, D]."""
        sizes = self.sizes
        q_BHSE = split_heads(self.make_queries(hidden_BSD), sizes.key_width)
        made = self.kv_a_proj_with_mqa(hidden_BSD)
        latent, shared = torch.split(made, [sizes.keys, sizes.turned], dim=-1)
        entered = self.layers.enter(self.kv_a_layernorm(latent))
        both_BHSX = split_heads(self.kv_b_proj(entered), sizes.plain + sizes.values)
        keys, v_BHSF = torch.split(both_BHSX, [sizes.plain, sizes.values], dim=-1)
        shared = split_heads(self.layers.enter(shared.contiguous()), sizes.turned)
        turned = self.turn(shared, places.cos, places.sin).expand(-1, keys.shape[1], -1, -1)
        plain, asking = torch.split(q_BHSE, [sizes.plain, sizes.turned], dim=-1)
        asking = self.turn(asking, places.cos, places.sin)
        mixed_BHSF = self._attend(
            torch.cat((plain, asking), -1), torch.cat((keys, turned), -1), v_BHSF, places
        )
        output: torch.Tensor = self.o_proj(mixed_BHSF.transpose(1, 2).flatten(2))
        return output

    def _attend(
        self, q_BHSE: torch.Tensor, k_BHSE: torch.Tensor, v_BHSF: torch.Tensor, places: Places
    ) -> torch.Tensor:
        # Fused kernels want queries, keys and values of one width: zeros add nothing.
        width = self.sizes.kernel_width
        padded = [
            F.pad(x, (0, width - x.shape[-1])) for x in (q_BHSE * self.factor, k_BHSE, v_BHSF)
        ]
        mixed = self.layers.attend(padded[0], padded[1], padded[2], places.documents)
        return mixed[..., : self.sizes.values]

    def _straight_queries(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        queries: torch.Tensor = self.q_proj(self.layers.enter(hidden_BSD))
        return queries

    def _latent_queries(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        latent = self.q_a_layernorm(self.q_a_proj(hidden_BSD))
        queries: torch.Tensor = self.q_b_proj(self.layers.enter(latent))
        return queries


def turn_neighbours(x_BHSE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return queries or keys turned in pairs of neighbours, in an order of their own.

    The order is the same for queries and keys, and nothing but their products is seen.
    """
    halves = torch.cat((x_BHSE[..., ::2], x_BHSE[..., 1::2]), dim=-1)
    return turn(halves, cos, sin)
