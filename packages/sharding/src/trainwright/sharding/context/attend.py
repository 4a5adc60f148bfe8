"""Attention where spans say what sees what, on fused kernels."""

# Shapes: B batch, H query heads, K key/value heads, S queries, T keys, E size of a head.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trainwright.sharding.context.kernels import Kernel, choose_kernel
from trainwright.sharding.context.merging import MergedOutput, SummedGradients
from trainwright.sharding.context.spans import Span
from trainwright.sharding.errors import ShardingError


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Sequence[Span],
    *,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each query gathers from the keys that it sees, and the log-sum-exp.

    Args:
        q: [B, H, S, E].
        k: [B, K, T, E]; each key/value head serves H / K neighbouring query heads.
        v: [B, K, T, F]; the fused kernels need F = E.
        spans: What sees what; a pair in two spans counts twice. A block without spans costs
            nothing.
        scale: Of the scores; None: 1 / sqrt(E).
        kernel: What computes a span; None: `choose_kernel`, which tells.

    Returns:
        The output [B, H, S, F], 0 for a query that sees no key; and the log-sum-exp of its scores
        [B, H, S], -inf there, in at least float32, through which no gradient passes.

    Raises:
        ShardingError: Shapes, dtypes or devices do not fit, or a span leaves the tensors.
    """
    check_tensors(q, k, v)
    _check_spans(q, k, spans)
    chosen = choose_kernel(q, k, v) if kernel is None else kernel
    found: tuple[torch.Tensor, torch.Tensor] = _Attend.apply(  # type: ignore[no-untyped-call]
        q, k, v, tuple(spans), chosen, scale_of(q, scale)
    )
    return found


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise if the tensors are not queries, keys and values of one attention.

    Raises:
        ShardingError: Shapes, dtypes or devices do not fit.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShardingError(f"q, k and v are [B, heads, S, E], got {shapes}")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ShardingError(
            "q, k and v need one batch, k and v one number of heads and of positions, q and k one "
            f"size of a head, got {shapes}"
        )
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] or q.shape[1] < 1:
        raise ShardingError(
            f"query heads must be a multiple of the key/value heads, got {q.shape[1]} and "
            f"{k.shape[1]}"
        )
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.is_floating_point():
        raise ShardingError(
            f"q, k and v need one floating-point dtype, got {q.dtype}, {k.dtype}, {v.dtype}; "
            "cast them to that of the queries"
        )
    if len({q.device, k.device, v.device}) > 1:
        raise ShardingError(
            f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}"
        )


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """Return the factor of the scores."""
    return 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else float(scale)


def _check_spans(q: torch.Tensor, k: torch.Tensor, spans: Sequence[Span]) -> None:
    for span in spans:
        rows = span.rows or (0, 0)
        if span.queries[1] > q.shape[2] or span.keys[1] > k.shape[2] or rows[1] > q.shape[0]:
            raise ShardingError(
                f"{span} leaves the {q.shape[2]} queries, {k.shape[2]} keys or {q.shape[0]} "
                "sequences"
            )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spans: tuple[Span, ...],
        kernel: Kernel,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        merged = MergedOutput(q, v.shape[-1], kernel, scale)
        merged.add(k, v, spans)
        out, lse = merged.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans, ctx.kernel, ctx.scale = spans, kernel, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        sums = SummedGradients(q, out, lse, grad_out, ctx.kernel, ctx.scale)
        grad_k, grad_v = sums.add(k, v, ctx.spans)
        return sums.of_queries(), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None
