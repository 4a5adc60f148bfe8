"""Errors of offload."""

from __future__ import annotations

from trainwright.sharding.errors import ShardingError


class OffloadError(ShardingError, RuntimeError):
    """States could not be kept where they should be: a disk is full, a budget is exceeded."""
