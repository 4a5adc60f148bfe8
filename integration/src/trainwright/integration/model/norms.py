"""Norms of the residual stream and of heads, computed in at least float32."""

# Shapes: ... any leading dims, D the features that are normalised.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised tensor [..., D] in the input's dtype."""
        exact = at_least_float32(hidden)
        scale = at_least_float32(self.weight)
        normed = F.rms_norm(exact, scale.shape, scale, self.epsilon)
        return normed.to(hidden.dtype)


class LayerNorm(nn.Module):
    """Layer norm with a bias, computed in at least float32.

    Source: Ba et al., Layer Normalization (2016).
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised tensor [..., D] in the input's dtype."""
        exact = at_least_float32(hidden)
        scale, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        normed = F.layer_norm(exact, scale.shape, scale, bias, self.epsilon)
        return normed.to(hidden.dtype)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32, or unchanged where it is already float32 or float64."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
