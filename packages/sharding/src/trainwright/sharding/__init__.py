"""Meshes, placements, data and tensor parallelism for PyTorch modules."""

from trainwright.sharding.errors import NotAvailableError, ReplicaMismatchError, ShardingError
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.placement import (
    ParameterPlacement,
    Partial,
    Placement,
    Replicate,
    Shard,
    placements_of,
    shard_spec,
)
from trainwright.sharding.protocol import GradientPiece, ParallelModule

__all__ = [
    "GradientPiece",
    "Mesh",
    "MeshShape",
    "NotAvailableError",
    "ParallelModule",
    "ParameterPlacement",
    "Partial",
    "Placement",
    "ReplicaMismatchError",
    "Replicate",
    "Shard",
    "ShardingError",
    "placements_of",
    "shard_spec",
]
