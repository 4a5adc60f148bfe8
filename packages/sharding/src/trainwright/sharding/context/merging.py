"""Attention over several blocks, from what a kernel says of each."""

# Shapes: B batch, H query heads, K key/value heads, S queries, T keys, E size of a head.

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.sharding.context.kernels import Gradients, Kernel
from trainwright.sharding.context.spans import Span, by_queries

_QUERY_PARTS = 4
_LEAST_QUERIES = 1024


class MergedOutput:
    """The output over the blocks added so far, in at least float32.

    A block's part of the output counts by its part of the sum of exponentials:
    out + (found - out) * sigmoid(lse_found - lse). A query that has seen no key has output 0 and
    log-sum-exp -inf, and takes over the first block it sees as it is.

    Args:
        q: The queries [B, H, S, E].
        out_size: The size of a head of the values.
        kernel: What computes blocks.
        scale: Of the scores.
    """

    def __init__(self, q: torch.Tensor, out_size: int, kernel: Kernel, scale: float) -> None:
        self._q = q
        self._kernel = kernel
        self._scale = scale
        self._shape = (*q.shape[:3], out_size)
        self._dtype = torch.promote_types(q.dtype, torch.float32)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, k: torch.Tensor, v: torch.Tensor, spans: Iterable[Span]) -> None:
        """Add what the spans show of these keys and values [B, K, T, E]."""
        for span in spans:
            at = index_of(span, span.queries)
            keys = index_of(span, span.keys)
            found, lse = self._kernel.forward(
                self._q[at], k[keys], v[keys], span.causal, self._scale
            )
            if self._out is None and found.shape == self._shape:
                self._out, self._lse = found.to(self._dtype), lse
                continue
            out, total = self._started()
            part, so_far = out[at], total[at]
            part.lerp_(found.to(self._dtype), torch.sigmoid(lse - so_far).unsqueeze(-1))
            torch.logaddexp(so_far, lse, out=so_far)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output in the dtype of the queries, and the log-sum-exp."""
        out, lse = self._started()
        return out.to(self._q.dtype), lse

    def _started(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._out is None or self._lse is None:
            self._out = self._q.new_zeros(self._shape, dtype=self._dtype)
            self._lse = self._out.new_full(self._shape[:3], -torch.inf)
        return self._out, self._lse


class SummedGradients:
    """Gradients of queries over all blocks, and of the keys and values of one block after another.

    Args:
        q: The queries.
        out: The output over all blocks.
        lse: Its log-sum-exp.
        grad_out: The gradient of the output.
        kernel: What computes blocks.
        scale: Of the scores.
    """

    def __init__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        kernel: Kernel,
        scale: float,
    ) -> None:
        self._saved = (q, out, lse, grad_out)
        self._kernel = kernel
        self._scale = scale
        self._dtype = torch.promote_types(q.dtype, torch.float32)
        self._grad_q: torch.Tensor | None = None
        # A kernel returns a new tensor for each call; a few queries at a time keep it small.
        self._most = max(_LEAST_QUERIES, -(-q.shape[2] // _QUERY_PARTS))

    def add(
        self, k: torch.Tensor, v: torch.Tensor, spans: Iterable[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the gradient of the queries; return those of k and v, in at least float32."""
        grad_k: torch.Tensor | None = None
        grad_v: torch.Tensor | None = None
        parts = [part for span in spans for part in by_queries(span, self._most)]
        for span in parts:
            keys = index_of(span, span.keys)
            found = self._of_span(span, k[keys], v[keys])
            self._grad_q = self._sum(
                self._grad_q, self._saved[0], index_of(span, span.queries), found[0]
            )
            grad_k = self._sum(grad_k, k, keys, found[1])
            grad_v = self._sum(grad_v, v, keys, found[2])
        return (
            k.new_zeros(k.shape, dtype=self._dtype) if grad_k is None else grad_k,
            v.new_zeros(v.shape, dtype=self._dtype) if grad_v is None else grad_v,
        )

    def of_queries(self) -> torch.Tensor:
        """Return the gradient of the queries in their dtype."""
        q = self._saved[0]
        return torch.zeros_like(q) if self._grad_q is None else self._grad_q.to(q.dtype)

    def _of_span(self, span: Span, k: torch.Tensor, v: torch.Tensor) -> Gradients:
        at = index_of(span, span.queries)
        q, out, lse, grad_out = (tensor[at] for tensor in self._saved)
        return self._kernel.backward(grad_out, (q, k, v), out, lse, span.causal, self._scale)

    def _sum(
        self,
        total: torch.Tensor | None,
        like: torch.Tensor,
        at: tuple[slice, slice, slice],
        found: torch.Tensor,
    ) -> torch.Tensor:
        if total is None:
            if found.shape == like.shape:
                return found.to(self._dtype)
            total = like.new_zeros(like.shape, dtype=self._dtype)
        total[at].add_(found)
        return total


def index_of(span: Span, ends: tuple[int, int]) -> tuple[slice, slice, slice]:
    """Return the index of a range of a span in a tensor [B, heads, S, ...]."""
    return slice(*(span.rows or (None,))), slice(None), slice(*ends)
