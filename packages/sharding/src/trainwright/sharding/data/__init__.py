"""Data parallelism: gradients summed over ranks, model states whole or cut."""

from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.layout import (
    BucketLayout,
    GroupKey,
    GroupLayout,
    ParameterRange,
)
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.optimizers import check_optimizer, parameter_groups
from trainwright.sharding.data.parallel import data_parallel
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.data.unit import Unit
from trainwright.sharding.data.units import UnitRule, by_class, by_name, by_size
from trainwright.sharding.data.vocabularies import Translation
from trainwright.sharding.data.vocabulary_deepspeed import policy_from_deepspeed
from trainwright.sharding.data.vocabulary_fsdp import policy_from_fsdp
from trainwright.sharding.data.whole_matrices import WholeMatrices

__all__ = [
    "BucketLayout",
    "DataParallel",
    "GroupKey",
    "GroupLayout",
    "LifecycleError",
    "ParameterRange",
    "Piece",
    "ShardPolicy",
    "Translation",
    "Unit",
    "UnitRule",
    "WholeMatrices",
    "by_class",
    "by_name",
    "by_size",
    "check_optimizer",
    "data_parallel",
    "parameter_groups",
    "policy_from_deepspeed",
    "policy_from_fsdp",
]
