"""Errors of data parallelism, and how they list names."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.sharding.errors import ShardingError


class LifecycleError(ShardingError, RuntimeError):
    """A step's calls came in an order that would give wrong gradients or weights."""


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
