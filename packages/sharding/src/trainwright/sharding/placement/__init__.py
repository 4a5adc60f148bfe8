"""Placements: what each rank of an axis holds of a tensor, and what follows from it."""

from trainwright.sharding.placement.parameters import ParameterPlacement, placements_of, shard_spec
from trainwright.sharding.placement.values import Partial, Placement, Replicate, Shard

__all__ = [
    "ParameterPlacement",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "placements_of",
    "shard_spec",
]
