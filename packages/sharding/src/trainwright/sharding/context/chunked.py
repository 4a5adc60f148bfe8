"""Attention of plain products in chunks, for tensors that no fused kernel takes."""

# Shapes: B batch, K key/value heads, G query heads of each, S queries, T keys, E size of a head.

from __future__ import annotations

from collections.abc import Iterator

import attrs
import torch

_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Range = tuple[int, int]


@attrs.frozen
class ChunkedKernel:
    """Exact attention on any device, in any floating-point dtype, with values of any size.

    Scores exist for one chunk of queries and one of keys at a time, in at least float32.

    Args:
        chunk: Queries, and keys, of a chunk.
    """

    chunk: int = 512

    @property
    def name(self) -> str:
        """What it is called."""
        return "chunked"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [B, H, S, E] and its log-sum-exp [B, H, S]."""
        q_BKGSE, k_BKTE, v_BKTE = _grouped(q, k), _wide(k), _wide(v)
        out = q_BKGSE.new_zeros((*q_BKGSE.shape[:-1], v.shape[-1]))
        lse = q_BKGSE.new_full(q_BKGSE.shape[:-1], -torch.inf)
        for rows, keys in self._blocks(q.shape[2], k.shape[2], causal):
            scores = _scores(q_BKGSE, k_BKTE, rows, keys) * scale
            _hide_later(scores, rows, keys, causal)
            lse_here = scores.logsumexp(-1)
            weights = (scores - lse_here.unsqueeze(-1)).exp_()
            found = weights @ v_BKTE[:, :, None, slice(*keys)]
            part, total = out[..., slice(*rows), :], lse[..., slice(*rows)]
            part.lerp_(found, torch.sigmoid(lse_here - total).unsqueeze(-1))
            torch.logaddexp(total, lse_here, out=total)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self,
        grad_out: torch.Tensor,
        inputs: _Three,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> _Three:
        """Return the terms of the gradients of q, k and v, given output and sum of all blocks."""
        q, k, v = inputs
        q_BKGSE, k_BKTE, v_BKTE = _grouped(q, k), _wide(k), _wide(v)
        gradient, whole = _grouped(grad_out, k), _grouped(out, k)
        lse_BKGS = _grouped(lse, k)
        common = (gradient * whole).sum(-1)
        grads = torch.zeros_like(q_BKGSE), torch.zeros_like(k_BKTE), torch.zeros_like(v_BKTE)
        for rows, keys in self._blocks(q.shape[2], k.shape[2], causal):
            at, seen = slice(*rows), slice(*keys)
            scores = _scores(q_BKGSE, k_BKTE, rows, keys) * scale
            _hide_later(scores, rows, keys, causal)
            weights = (scores - lse_BKGS[..., at].unsqueeze(-1)).exp_()
            asked = gradient[..., at, :]
            grads[2][:, :, seen] += (weights.mT @ asked).sum(2)
            slope = asked @ v_BKTE[:, :, None, seen].mT - common[..., at].unsqueeze(-1)
            slope = slope * weights * scale
            grads[0][..., at, :] += slope @ k_BKTE[:, :, None, seen]
            grads[1][:, :, seen] += (slope.mT @ q_BKGSE[..., at, :]).sum(2)
        grad_q, grad_k, grad_v = grads
        return grad_q.flatten(1, 2).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _blocks(self, queries: int, keys: int, causal: bool) -> Iterator[tuple[_Range, _Range]]:
        for start in range(0, queries, self.chunk):
            stop = min(start + self.chunk, queries)
            for first in range(0, stop if causal else keys, self.chunk):
                yield (start, stop), (first, min(first + self.chunk, keys))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _grouped(queries: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return queries (or what has their shape) with a dim for those that share a key head."""
    heads = k.shape[1]
    batch, queries_of_all, *rest = queries.shape
    return _wide(queries).reshape(batch, heads, queries_of_all // heads, *rest)


def _scores(q: torch.Tensor, k: torch.Tensor, rows: _Range, keys: _Range) -> torch.Tensor:
    return q[..., slice(*rows), :] @ k[:, :, None, slice(*keys)].mT


def _hide_later(scores: torch.Tensor, rows: _Range, keys: _Range, causal: bool) -> None:
    if causal and keys[1] > rows[0] + 1:
        places = torch.arange(*rows, device=scores.device).unsqueeze(1)
        later = torch.arange(*keys, device=scores.device) > places
        scores.masked_fill_(later, -torch.inf)
