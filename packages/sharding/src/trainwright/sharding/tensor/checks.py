"""Checks of sizes and indices that a tensor-parallel layer depends on."""

from __future__ import annotations

import torch

from trainwright.sharding.divisions import check_divides
from trainwright.sharding.errors import ShardingError


def local_heads(num_heads: int, num_kv_heads: int, tp_size: int) -> tuple[int, int]:
    """Return how many query and key/value heads each tensor rank holds, where all hold as many.

    `HeadLayout` shares out any numbers of heads.

    Args:
        num_heads: Query heads of the layer.
        num_kv_heads: Key/value heads of the layer; each serves the same number of query heads.
        tp_size: Tensor-parallel ranks.

    Raises:
        ShardingError: The sizes do not divide; the message names the nearest that do.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShardingError(
            f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )
    if num_kv_heads < tp_size:
        raise ShardingError(
            f"num_kv_heads={num_kv_heads} is less than tp={tp_size}, so ranks share a head: choose "
            f"a tp that divides {num_kv_heads}, or HeadLayout with KeyValueLinear"
        )
    check_divides(num_heads, tp_size, "num_heads", "tp")
    check_divides(num_kv_heads, tp_size, "num_kv_heads", "tp")
    return num_heads // tp_size, num_kv_heads // tp_size


def check_indices(
    indices: torch.Tensor, size: int, what: str, *, ignore_index: int | None = None
) -> None:
    """Raise unless every index is in 0..size - 1 or is ``ignore_index``.

    The layers call it where reading a tensor stalls nothing, on the host. On an accelerator an
    index out of range stops at the device's own assertion; for debugging, call this first.

    Args:
        indices: Integers of any shape.
        size: One past the largest index.
        what: What an index is, for the message.
        ignore_index: A value that is allowed besides.

    Raises:
        ShardingError: Indices are not integers, or one is out of range; the first is named.
    """
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ShardingError(f"{what} must be integers, got {indices.dtype}")
    wrong = (indices < 0) | (indices >= size)
    if ignore_index is not None:
        wrong &= indices != ignore_index
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        ignored = "" if ignore_index is None else f" or {ignore_index} to be ignored"
        raise ShardingError(
            f"{what} must be in 0..{size - 1}{ignored}, got {int(indices[at])} at {at}"
        )
