"""Small measures against logits and embeddings that run away."""

# Shapes: B batch, S sequence, V vocabulary, D model, H heads, K key heads, E width of a head.

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainwright.stability_guards.errors import GuardError

Z_LOSS = 1e-4
"""PaLM's coefficient."""


def z_loss(
    logits_BSV: torch.Tensor, valid_BS: torch.Tensor | None = None, coefficient: float = Z_LOSS
) -> torch.Tensor:
    """Return ``coefficient`` times the squares of the log-normalisers, summed over valid tokens.

    Added to the loss, it keeps the softmax's normaliser Z near 1. Being a sum over tokens, it is
    divided once by the number of valid tokens of the global batch, as the loss is.

    Args:
        logits_BSV: of any leading dims; computed with in at least float32.
        valid_BS: bool, which tokens count; None for all.
        coefficient: from 0.

    Returns:
        0-d, at least float32. Tokens that do not count add neither value nor gradient, whatever
        their logits.

    Raises:
        GuardError: the coefficient is negative, or the shapes do not fit.

    Source:
        Chowdhery et al., PaLM (2022), section 5.
    """
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    if valid_BS is not None and valid_BS.shape == logits_BSV.shape[:-1]:
        # Before the exponentials: zero times the gradient of an infinity would be NaN.
        logits_BSV = logits_BSV.masked_fill(~valid_BS.bool().unsqueeze(-1), 0.0)
    return z_loss_of(torch.logsumexp(logits_BSV.to(wide), dim=-1), valid_BS, coefficient)


def z_loss_of(
    log_z_BS: torch.Tensor, valid_BS: torch.Tensor | None = None, coefficient: float = Z_LOSS
) -> torch.Tensor:
    """Return `z_loss` where the log-normalisers are known, as of logits cut along the vocabulary.

    Args:
        log_z_BS: log of the sum of exponentials of each token's logits, over the whole vocabulary.
        valid_BS: as in `z_loss`.
        coefficient: as in `z_loss`.

    Raises:
        GuardError: the coefficient is negative, or the shapes do not fit.
    """
    if not coefficient >= 0.0:
        raise GuardError(f"coefficient must be from 0, got {coefficient}")
    if valid_BS is not None:
        if valid_BS.shape != log_z_BS.shape or valid_BS.dtype != torch.bool:
            raise GuardError(
                f"valid must be bool of shape {tuple(log_z_BS.shape)}, got {valid_BS.dtype} of "
                f"{tuple(valid_BS.shape)}"
            )
        log_z_BS = torch.where(valid_BS, log_z_BS, 0.0)
    return coefficient * log_z_BS.square().sum()


def shrink_gradient(tensor: torch.Tensor, share: float) -> torch.Tensor:
    """Return ``tensor`` itself, to the bit, of whose gradient only ``share`` flows back.

    For the output of an embedding, whose gradients dwarf those of other layers early in training.
    ``tensor * share + tensor.detach() * (1 - share)`` is the same but for rounding.

    Args:
        tensor: of any shape.
        share: from 0 to 1; 0.1 in GLM-130B.

    Raises:
        GuardError: the share is out of range.

    Source:
        Zeng et al., GLM-130B (2022), section 3.1, embedding layer gradient shrink.
    """
    if not 0.0 <= share <= 1.0:
        raise GuardError(f"share must be from 0 to 1, got {share}")
    result: torch.Tensor = _Shrink.apply(tensor, share)  # type: ignore[no-untyped-call]
    return result


class QKNorm(nn.Module):
    """Norms queries and keys of each head to mean square 1, times a learned gain a channel.

    No logit then exceeds sqrt(E) times the largest product of gains, whatever the weights before.

    Args:
        width: E, the width of a head.
        eps: added to the mean square.
        device: of the gains.
        dtype: of the gains.

    Source:
        Henry et al., Query-Key Normalization for Transformers (2020); with RMS norms and a gain a
        channel, before the rotary embedding, as in Qwen3.
    """

    def __init__(
        self,
        width: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(width, eps=eps, device=device, dtype=dtype)
        self.k_norm = nn.RMSNorm(width, eps=eps, device=device, dtype=dtype)

    def forward(
        self, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys, normed over their last dim in at least float32.

        Args:
            q_BHSE: queries, of any leading dims.
            k_BKSE: keys, of any leading dims.

        Returns:
            Both with the shapes and dtypes given.

        Raises:
            GuardError: the last dim is not ``width``.
        """
        return _normed(q_BHSE, self.q_norm), _normed(k_BKSE, self.k_norm)


def _normed(tensor: torch.Tensor, norm: nn.RMSNorm) -> torch.Tensor:
    if tensor.shape[-1] != norm.normalized_shape[0]:
        raise GuardError(
            f"heads must be of width {norm.normalized_shape[0]}, got {tuple(tensor.shape)}"
        )
    wide = torch.promote_types(tensor.dtype, torch.float32)
    weight = norm.weight.to(wide)
    normed = nn.functional.rms_norm(tensor.to(wide), norm.normalized_shape, weight, norm.eps)
    return normed.to(tensor.dtype)


class _Shrink(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.share, None
