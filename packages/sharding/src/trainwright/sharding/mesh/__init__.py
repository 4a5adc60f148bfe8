"""Meshes: how the ranks of a job are arranged along named axes."""

from trainwright.sharding.mesh.hosts import PlacementTable, placement_table
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.mesh.shape import (
    AXES,
    DENSE_AXES,
    EXPERT_AXES,
    HYBRID_AXES,
    MeshShape,
)

__all__ = [
    "AXES",
    "DENSE_AXES",
    "EXPERT_AXES",
    "HYBRID_AXES",
    "Mesh",
    "MeshShape",
    "PlacementTable",
    "placement_table",
]
