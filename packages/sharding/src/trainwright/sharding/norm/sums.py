"""Sums over the elements of many tensors: fast, and accurate for millions of elements.

Every tensor is read once, in rows of 1024 elements whose norms are computed in at least float32
and combined in float64. A running float32 sum over 23 million elements is off by 1e-3; over rows of
64Ki equal elements still by 5e-5; over rows of 1024 by at most about 1e-6, at the same speed. The
squares of a row must fit its dtype: float32 elements below 1e19.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from trainwright.sharding.errors import ShardingError

_ROW = 1024
_COUNTED_AT_ONCE = 1 << 22


def square_sum(
    tensors: Iterable[torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the sum of the squares of all elements.

    Args:
        tensors: Floating-point tensors of any shapes, on one device; empty ones add nothing.
        dtype: Dtype in which a row is summed; None means the tensor's own, at least float32.
        device: Where the result lives if there are no tensors.

    Returns:
        A float64 tensor without dims; reading it is left to the caller, so nothing waits here.
    """
    return power_sum(tensors, 2.0, dtype=dtype, device=device)


def power_sum(
    tensors: Iterable[torch.Tensor],
    p: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the sum of the p-th powers of the magnitudes of all elements.

    Args:
        tensors: As in `square_sum`.
        p: Finite and positive.
        dtype: As in `square_sum`.
        device: As in `square_sum`.

    Returns:
        A float64 tensor without dims.

    Raises:
        ShardingError: ``p`` is not finite and positive.
    """
    if not 0 < p < math.inf:
        raise ShardingError(f"p must be finite and positive, got {p}; inf is largest_magnitude")
    return _total(row_norms(tensors, p, dtype), p, device)


def largest_magnitude(
    tensors: Iterable[torch.Tensor], *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the largest magnitude of all elements, 0 if there are none, NaN if one is NaN.

    Args:
        tensors: As in `square_sum`.
        device: As in `square_sum`.

    Returns:
        A float64 tensor without dims.
    """
    return _total(row_norms(tensors, math.inf, None), math.inf, device)


def non_finite_count(
    tensors: Iterable[torch.Tensor], *, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return how many elements are infinite or NaN.

    Args:
        tensors: As in `square_sum`.
        device: As in `square_sum`.

    Returns:
        A float64 tensor without dims.
    """
    read = list(tensors)
    return count_non_finite(read, row_norms(read, math.inf, None), device)


def row_norms(
    tensors: Iterable[torch.Tensor], p: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Return the p-norms of the rows of all tensors, as flat tensors; one pass over the data."""
    norms: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        summed_in = dtype or torch.promote_types(flat.dtype, torch.float32)
        whole = flat.numel() // _ROW * _ROW
        if whole:
            rows = flat[:whole].view(-1, _ROW)
            norms.append(torch.linalg.vector_norm(rows, p, dim=1, dtype=summed_in))
        if whole < flat.numel():
            rest = torch.linalg.vector_norm(flat[whole:], p, dtype=summed_in)
            norms.append(rest.reshape(1))
    return norms


def sum_rows(norms: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Return the sum of p-th powers, or for p = inf the largest, that `row_norms` stand for."""
    return _total(norms, p, device)


def count_non_finite(
    tensors: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor],
    device: torch.device | str | None,
) -> torch.Tensor:
    """Count infinite and NaN elements, given the row norms of the same tensors."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    # A row without a finite norm is rare; where reading its norm stalls nothing (on the host), the
    # second pass over all elements is saved.
    if norms[0].device.type == "cpu" and all(bool(row.isfinite().all()) for row in norms):
        return torch.zeros((), dtype=torch.float64, device=norms[0].device)
    counts: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for start in range(0, flat.numel(), _COUNTED_AT_ONCE):
            part = flat[start : start + _COUNTED_AT_ONCE]
            counts.append(part.numel() - part.isfinite().sum(dtype=torch.float64))
    return torch.stack(counts).sum()


def _total(
    norms: Sequence[torch.Tensor], p: float, device: torch.device | str | None
) -> torch.Tensor:
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.cat([rows.to(torch.float64) for rows in norms])
    return joined.max() if p == math.inf else joined.pow(p).sum()
