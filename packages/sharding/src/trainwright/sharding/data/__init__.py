"""Data parallelism: gradients summed over ranks, model states whole or cut."""

from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.layout import (
    BucketLayout,
    GroupKey,
    GroupLayout,
    ParameterRange,
)
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.parallel import data_parallel
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import ShardPolicy

__all__ = [
    "BucketLayout",
    "DataParallel",
    "GroupKey",
    "GroupLayout",
    "LifecycleError",
    "ParameterRange",
    "Piece",
    "ShardPolicy",
    "data_parallel",
]
