"""Weights of queries and keys shrunk where a head's logits have grown past a bound."""

# Shapes: B batch, H query heads, K key heads, S queries, T keys, E width of a head, D model.

from __future__ import annotations

import torch

from trainwright.collectives import Communicator, ReduceOp
from trainwright.stability_guards.errors import GuardError

MAX_LOGIT = 100.0
"""Kimi K2's bound."""

_QUERIES_AT_ONCE = 256


@torch.no_grad()
def largest_logits(
    q_BHSE: torch.Tensor,
    k_BKTE: torch.Tensor,
    scale: float | None = None,
    *,
    causal: bool = True,
    communicator: Communicator | None = None,
) -> torch.Tensor:
    """Return the largest attention logit of each query head, of pairs that see each other.

    The product over all pairs is made 256 queries at a time and thrown away: it costs the scores
    of one forward pass again, so measure every so many steps. `attention_logit_bound` costs linear
    time and may be far above.

    Args:
        q_BHSE: queries, after rotary embeddings.
        k_BKTE: keys, K a divisor of H: query heads share keys in order.
        scale: 1/sqrt(E) by default.
        causal: query s sees keys up to s + T - S only.
        communicator: ranks whose batches or positions belong to the same heads; None for one.

    Returns:
        [H], at least float32; -inf where no pair is visible.

    Raises:
        GuardError: the shapes do not fit.

    Communicates:
        One MAX all-reduce of H numbers.
    """
    queries, keys = q_BHSE.shape[1], k_BKTE.shape[1]
    if keys == 0 or queries % keys or q_BHSE.shape[-1] != k_BKTE.shape[-1]:
        raise GuardError(
            f"{queries} query heads of width {q_BHSE.shape[-1]} cannot share {keys} key heads of "
            f"width {k_BKTE.shape[-1]}"
        )
    wide = torch.promote_types(q_BHSE.dtype, torch.float32)
    batch, _, length, width = q_BHSE.shape
    seen = k_BKTE.shape[2]
    q_BKGSE = q_BHSE.reshape(batch, keys, queries // keys, length, width)
    k_BK1ET = k_BKTE.to(wide).unsqueeze(2).transpose(-1, -2)
    factor = q_BHSE.shape[-1] ** -0.5 if scale is None else scale
    largest_H = torch.full((queries,), -torch.inf, dtype=wide, device=q_BHSE.device)
    for start in range(0, length if batch and seen else 0, _QUERIES_AT_ONCE):
        rows_BKGSE = q_BKGSE[:, :, :, start : start + _QUERIES_AT_ONCE].to(wide)
        logits_BKGST = rows_BKGSE @ k_BK1ET * factor
        if causal:
            shape = logits_BKGST.shape[-2:]
            ahead_ST = torch.ones(shape, dtype=torch.bool, device=q_BHSE.device)
            ahead_ST = ahead_ST.triu(1 + start + seen - length)
            logits_BKGST = logits_BKGST.masked_fill(ahead_ST, -torch.inf)
        found_H = logits_BKGST.amax((0, 3, 4)).flatten()
        largest_H = torch.maximum(largest_H, found_H)
    if communicator is not None:
        communicator.all_reduce(largest_H, ReduceOp.MAX).wait()
    return largest_H


def qk_clip_factors(
    max_logits_H: torch.Tensor, num_key_heads: int, bound: float = MAX_LOGIT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by what queries and keys of each head are multiplied to bring logits to the bound.

    A head above the bound takes ``gamma = bound / max_logit``, half of it (its square root) on
    either side as published. Where query heads share a key head, the key takes the square root of
    the greatest gamma among them and each query head the rest, so that each head's logits shrink
    by its own gamma: a head below the bound is left as it was.

    Args:
        max_logits_H: largest logit of each query head.
        num_key_heads: K, a divisor of H.
        bound: the largest logit allowed.

    Returns:
        Factors [H] of queries and [K] of keys, at most 1; both 1 where a logit is not finite, for
        then the step is skipped and weights must not be spoiled.

    Raises:
        GuardError: the bound is not positive, or K does not divide H.

    Source:
        Kimi Team, Kimi K2 (2025), section 2.1 and algorithm 1 (MuonClip), with alpha = 1/2.
    """
    if not bound > 0.0:
        raise GuardError(f"bound must be positive, got {bound}")
    heads = len(max_logits_H)
    if num_key_heads < 1 or heads % num_key_heads:
        raise GuardError(f"{heads} query heads cannot share {num_key_heads} key heads")
    above_H = (max_logits_H > bound) & max_logits_H.isfinite()
    gamma_H = torch.where(above_H, bound / max_logits_H, 1.0)
    gamma_KG = gamma_H.view(num_key_heads, -1)
    key_K = gamma_KG.amax(1).sqrt()
    return (gamma_KG / key_K.unsqueeze(1)).flatten(), key_K


@torch.no_grad()
def qk_clip_(
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    max_logits_H: torch.Tensor,
    bound: float = MAX_LOGIT,
    *,
    num_key_heads: int | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shrink in place the projections of heads whose largest logit exceeded the bound.

    Call it after the optimizer's step, on the weights that it updates, with the logits of the
    forward pass before. Attention without QK-norm: a norm would undo it. Give biases too if there
    are any, or logits shrink by less.

    Args:
        q_weight: [H * E, D], heads along dim 0.
        k_weight: [K * E, D].
        max_logits_H: largest logit of each of this rank's query heads, as of `largest_logits`.
        bound: the largest logit allowed.
        num_key_heads: K where keys are shared; None for one key head a query head.
        q_bias: [H * E].
        k_bias: [K * E].

    Returns:
        [H], what each head's logits were multiplied by; 1 where nothing changed. The host does not
        wait.

    Raises:
        GuardError: the bound is not positive, or heads do not fit the weights.

    Source:
        As `qk_clip_factors`.
    """
    keys = len(max_logits_H) if num_key_heads is None else num_key_heads
    q_H, k_K = qk_clip_factors(max_logits_H, keys, bound)
    for name, tensor, factors in (
        ("q_weight", q_weight, q_H),
        ("q_bias", q_bias, q_H),
        ("k_weight", k_weight, k_K),
        ("k_bias", k_bias, k_K),
    ):
        if tensor is not None:
            _check_rows(name, tensor, len(factors))
    for tensor, factors in ((q_weight, q_H), (q_bias, q_H), (k_weight, k_K), (k_bias, k_K)):
        if tensor is not None:
            _scale_heads(_heads(tensor, len(factors)), factors)
    return q_H * k_K.repeat_interleave(len(q_H) // keys)


@torch.no_grad()
def qk_clip_latent_(
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    max_logits_H: torch.Tensor,
    bound: float = MAX_LOGIT,
    *,
    rotary_width: int,
    value_width: int,
) -> torch.Tensor:
    """Shrink in place the up-projections of latent attention, as `qk_clip_` does plain ones.

    Parts of a head's own take the square root of gamma on either side; its rotary queries take all
    of it, since their keys are shared by all heads and stay untouched. So do the values.

    Args:
        q_weight: [H * (content + rotary), Q], each head's content rows before its rotary rows, as
            DeepSeek-V3's ``q_b_proj``.
        kv_weight: [H * (content + value), C], as its ``kv_b_proj``.
        max_logits_H: largest logit of each of this rank's heads.
        bound: the largest logit allowed.
        rotary_width: rotary rows of a head of ``q_weight``.
        value_width: value rows of a head of ``kv_weight``.

    Returns:
        [H], what each head's logits were multiplied by. The host does not wait.

    Raises:
        GuardError: the bound is not positive, or heads do not fit the weights.

    Source:
        Kimi Team, Kimi K2 (2025), section 2.1 and algorithm 1.
    """
    heads = len(max_logits_H)
    half_H, _ = qk_clip_factors(max_logits_H, heads, bound)
    for name, weight, width in (
        ("q_weight", q_weight, rotary_width),
        ("kv_weight", kv_weight, value_width),
    ):
        _check_rows(name, weight, heads)
        if not 0 <= width < len(weight) // heads:
            raise GuardError(f"{width} of the {len(weight) // heads} rows of a head of {name}?")
    q_HED, kv_HED = _heads(q_weight, heads), _heads(kv_weight, heads)
    content = q_HED.shape[1] - rotary_width
    if content != kv_HED.shape[1] - value_width:
        raise GuardError(
            f"queries have {content} content rows a head, keys {kv_HED.shape[1] - value_width}"
        )
    _scale_heads(q_HED[:, :content], half_H)
    _scale_heads(q_HED[:, content:], half_H.square())
    _scale_heads(kv_HED[:, :content], half_H)
    return half_H.square()


def _check_rows(name: str, tensor: torch.Tensor, heads: int) -> None:
    if heads == 0 or tensor.ndim == 0 or len(tensor) % heads:
        raise GuardError(f"{name} of shape {tuple(tensor.shape)} does not hold {heads} heads")


def _heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    # A view, also of what is not contiguous: dim 0 alone is split.
    return tensor.view(heads, len(tensor) // heads, *tensor.shape[1:])


def _scale_heads(rows: torch.Tensor, factors_H: torch.Tensor) -> None:
    shape = (-1, *[1] * (rows.ndim - 1))
    wide = torch.promote_types(rows.dtype, torch.float32)
    rows.mul_(factors_H.to(rows.device, wide).view(shape))
