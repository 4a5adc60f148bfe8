"""Activation policies: what is kept for the backward pass and what is computed again."""

from trainwright.checkpointing.errors import (
    CheckpointingError,
    NotAvailableYetError,
    PolicyError,
    ReplayError,
)
from trainwright.checkpointing.protocol import Capture, LayerRunner, Reenter

from .ambient import capture_function_modes
from .policy import KeepAll, RecomputeEvery, keep_all, parse_policy, recompute_all, recompute_every
from .recompute import Recomputed, recompute

__all__ = [
    "Capture",
    "CheckpointingError",
    "KeepAll",
    "LayerRunner",
    "NotAvailableYetError",
    "PolicyError",
    "RecomputeEvery",
    "Recomputed",
    "Reenter",
    "ReplayError",
    "capture_function_modes",
    "keep_all",
    "parse_policy",
    "recompute",
    "recompute_all",
    "recompute_every",
]
