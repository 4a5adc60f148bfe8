"""Errors of data parallelism."""

from __future__ import annotations

from trainwright.sharding.errors import ShardingError


class LifecycleError(ShardingError, RuntimeError):
    """A step's calls came in an order that would give wrong gradients or weights."""
