"""Attention, SwiGLU and norm of the decoder, independent of how their products are sharded."""

# Shapes: B batch, S sequence, D model, H query heads, K key/value heads, E head features, F hidden.
# A shard keeps its letters: on a tensor-parallel rank H, K, F and V are this rank's part.

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from trainwright.integration.model.plain_experts import PlainExperts
from trainwright.integration.model.shape import ExpertShape, ModelShape


class Layers(Protocol):
    """What the decoder asks of its building blocks, which ranks may share."""

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """Return a bias-free product whose output features are shared out over the ranks.

        Its input has passed through ``enter``.
        """
        ...

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """Return a bias-free product whose input features are shared out over the ranks."""
        ...

    def attention(self, shape: ModelShape) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        """Return the query, key, value and output products, bias-free.

        The first three make whole heads from what has passed through ``enter``, as many of keys as
        of values, which divide those of queries and serve equally many neighbours each.
        """
        ...

    def attend(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention [B, H, S, E] over whole sequences, of which S may be a part."""
        ...

    def norm(self, width: int, epsilon: float) -> nn.Module:
        """Return a norm of the residual stream."""
        ...

    def embedding(self, vocabulary: int, width: int) -> nn.Module:
        """Return a table of token vectors."""
        ...

    def enter(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Hand the residual stream to column products: sums their input gradients in backward."""
        ...

    def experts(self, width: int, experts: ExpertShape) -> nn.Module:
        """Return a mixture of experts; its input has not passed through ``enter``.

        It is called with the residual stream [B, S, D] and, by name, ``positions_S``, and returns
        its output and a report with the 0-d sums ``balance`` and ``z`` over the tokens.
        """
        ...

    def between(self, positions_S: torch.Tensor) -> torch.Tensor:
        """Return those of this rank's positions that its residual stream has between products."""
        ...

    def cross_entropy(
        self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        """Return the loss of each token [B, S]; zero where the label is -100."""
        ...

    def join_vocabulary(self, logits_V: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return the logits of the whole vocabulary, given those that the head returned."""
        ...


class PlainLayers:
    """PyTorch's own modules: the serial model."""

    def column(self, in_features: int, out_features: int) -> nn.Module:
        """Return an ``nn.Linear``."""
        return nn.Linear(in_features, out_features, bias=False)

    def row(self, in_features: int, out_features: int) -> nn.Module:
        """Return an ``nn.Linear``."""
        return nn.Linear(in_features, out_features, bias=False)

    def attention(self, shape: ModelShape) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        """Return four of ``nn.Linear``."""
        queries = shape.heads * shape.head_width
        rows = shape.kv_heads * shape.head_width
        return (
            self.column(shape.width, queries),
            self.column(shape.width, rows),
            self.column(shape.width, rows),
            self.row(queries, shape.width),
        )

    def attend(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor
    ) -> torch.Tensor:
        """Return PyTorch's causal attention."""
        return attend_causally(q_BHSE, k_BKSE, v_BKSE)

    def norm(self, width: int, epsilon: float) -> nn.Module:
        """Return an `RMSNorm`."""
        return RMSNorm(width, epsilon)

    def embedding(self, vocabulary: int, width: int) -> nn.Module:
        """Return an ``nn.Embedding``."""
        return nn.Embedding(vocabulary, width)

    def enter(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return hidden_BSD

    def experts(self, width: int, experts: ExpertShape) -> nn.Module:
        """Return a `PlainExperts`."""
        return PlainExperts(width, experts)

    def between(self, positions_S: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return positions_S

    def cross_entropy(
        self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor, vocabulary: int
    ) -> torch.Tensor:
        """Return the loss of each token [B, S], in at least float32."""
        logits = at_least_float32(logits_BSV).flatten(0, 1)
        losses = F.cross_entropy(logits, labels_BS.flatten(), ignore_index=-100, reduction="none")
        return losses.view_as(labels_BS)

    def join_vocabulary(self, logits_V: torch.Tensor, vocabulary: int) -> torch.Tensor:
        """Return the tensor itself."""
        return logits_V


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the normalised tensor [B, S, D] in the input's dtype."""
        exact = at_least_float32(hidden_BSD)
        scale = at_least_float32(self.weight)
        normed = F.rms_norm(exact, scale.shape, scale, self.epsilon)
        return normed.to(hidden_BSD.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions, on a fused kernel."""

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.layers = layers
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layers.attention(shape)

    def forward(
        self, hidden_BSD: torch.Tensor, cos_SE: torch.Tensor, sin_SE: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output [B, S, D]."""
        entered_BSD = self.layers.enter(hidden_BSD)
        q_BHSE = _split_heads(self.q_proj(entered_BSD), self.head_width)
        k_BKSE = _split_heads(self.k_proj(entered_BSD), self.head_width)
        v_BKSE = _split_heads(self.v_proj(entered_BSD), self.head_width)
        mixed_BHSE = self.layers.attend(
            _rotate(q_BHSE, cos_SE, sin_SE), _rotate(k_BKSE, cos_SE, sin_SE), v_BKSE
        )
        output: torch.Tensor = self.o_proj(mixed_BHSE.transpose(1, 2).flatten(2))
        return output


class SwiGLU(nn.Module):
    """The gated feed-forward block: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.layers = layers
        self.gate_proj = layers.column(shape.width, shape.mlp_width)
        self.up_proj = layers.column(shape.width, shape.mlp_width)
        self.down_proj = layers.row(shape.mlp_width, shape.width)

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        """Return the block's output [B, S, D]."""
        entered_BSD = self.layers.enter(hidden_BSD)
        gated_BSF = F.silu(self.gate_proj(entered_BSD)) * self.up_proj(entered_BSD)
        output: torch.Tensor = self.down_proj(gated_BSF)
        return output


class Block(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, shape: ModelShape, layers: Layers) -> None:
        super().__init__()
        self.input_layernorm = layers.norm(shape.width, shape.norm_epsilon)
        self.self_attn = Attention(shape, layers)
        self.post_attention_layernorm = layers.norm(shape.width, shape.norm_epsilon)
        self.mlp = SwiGLU(shape, layers)

    def forward(
        self, hidden_BSD: torch.Tensor, cos_SE: torch.Tensor, sin_SE: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual stream [B, S, D] after this block."""
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), cos_SE, sin_SE)
        output: torch.Tensor = hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))
        return output


class ExpertBlock(nn.Module):
    """One pre-norm decoder block whose feed-forward part is a mixture of experts."""

    def __init__(self, shape: ModelShape, experts: ExpertShape, layers: Layers) -> None:
        super().__init__()
        self.sizes = experts
        self.input_layernorm = layers.norm(shape.width, shape.norm_epsilon)
        self.self_attn = Attention(shape, layers)
        self.post_attention_layernorm = layers.norm(shape.width, shape.norm_epsilon)
        self.mlp = layers.experts(shape.width, experts)

    def forward(
        self,
        stream: tuple[torch.Tensor, torch.Tensor],
        cos_SE: torch.Tensor,
        sin_SE: torch.Tensor,
        positions_S: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream [B, S, D] and the auxiliary losses after this block.

        Args:
            stream: The same before it; the losses are a 0-d sum over tokens.
        """
        hidden_BSD, losses = stream
        hidden_BSD = hidden_BSD + self.self_attn(self.input_layernorm(hidden_BSD), cos_SE, sin_SE)
        normed_BSD = self.post_attention_layernorm(hidden_BSD)
        output_BSD, report = self.mlp(normed_BSD, positions_S=positions_S)
        losses = losses + self.sizes.balance * report.balance + self.sizes.z * report.z
        return hidden_BSD + output_BSD, losses


def rotary_angles(
    positions_S: torch.Tensor, head_width: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine [S, E] of the rotary angles, in at least float32.

    Angles are computed in float64: at position 2,000 a half-precision angle is off by a radian.
    Source: Su et al., RoFormer, section 3.4.2, in the half-split order of Llama's weights.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions_S.device)
    frequencies = torch.pow(base, -exponents / head_width)
    angles_SE = (positions_S.to(torch.float64)[:, None] * frequencies).repeat(1, 2)
    kept = dtype if dtype == torch.float64 else torch.float32
    return angles_SE.cos().to(kept), angles_SE.sin().to(kept)


def attend_causally(
    q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor
) -> torch.Tensor:
    """Return PyTorch's causal attention [B, H, S, E] over whole sequences."""
    return F.scaled_dot_product_attention(
        q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1]
    )


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32, or unchanged where it is already float32 or float64."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _split_heads(features_BSX: torch.Tensor, head_width: int) -> torch.Tensor:
    return features_BSX.view(*features_BSX.shape[:2], -1, head_width).transpose(1, 2)


def _rotate(x_BHSE: torch.Tensor, cos_SE: torch.Tensor, sin_SE: torch.Tensor) -> torch.Tensor:
    exact = x_BHSE.to(cos_SE.dtype)
    first, second = exact.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (exact * cos_SE + turned * sin_SE).to(x_BHSE.dtype)
