"""Meshes, placements, data and tensor parallelism for PyTorch modules."""

from trainwright.sharding.data import (
    DataParallel,
    LifecycleError,
    Piece,
    ShardPolicy,
    data_parallel,
)
from trainwright.sharding.errors import NotAvailableError, ReplicaMismatchError, ShardingError
from trainwright.sharding.mesh import Mesh, MeshShape
from trainwright.sharding.norm import (
    StepTotals,
    largest_magnitude,
    non_finite_count,
    one_norm,
    power_sum,
    square_sum,
)
from trainwright.sharding.placement import (
    ParameterPlacement,
    Partial,
    Placement,
    Replicate,
    Shard,
    Transition,
    check_replicated,
    check_replicated_parameters,
    placements_of,
    plan_redistribution,
    redistribute,
    shard_spec,
)
from trainwright.sharding.protocol import GradientPiece, ParallelModule
from trainwright.sharding.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    check_indices,
    draw_parameter_,
    local_heads,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "ColumnParallelLinear",
    "DataParallel",
    "GradientPiece",
    "LifecycleError",
    "Mesh",
    "MeshShape",
    "NotAvailableError",
    "ParallelModule",
    "ParameterPlacement",
    "Partial",
    "Piece",
    "Placement",
    "ReplicaMismatchError",
    "Replicate",
    "RowParallelLinear",
    "Shard",
    "ShardPolicy",
    "ShardingError",
    "StepTotals",
    "Transition",
    "VocabParallelEmbedding",
    "check_indices",
    "check_replicated",
    "check_replicated_parameters",
    "data_parallel",
    "draw_parameter_",
    "largest_magnitude",
    "local_heads",
    "non_finite_count",
    "one_norm",
    "placements_of",
    "plan_redistribution",
    "power_sum",
    "redistribute",
    "shard_spec",
    "square_sum",
    "vocab_parallel_cross_entropy",
]
