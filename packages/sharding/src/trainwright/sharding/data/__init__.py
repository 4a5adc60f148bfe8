"""Data parallelism: gradients summed over ranks, model states whole or cut."""

from trainwright.sharding.data.deepspeed_reasons import DEEPSPEED_REASONS
from trainwright.sharding.data.dtensor import dtensor_state_dict
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.layout import (
    BucketLayout,
    GroupKey,
    GroupLayout,
    ParameterRange,
)
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.loading import load_full
from trainwright.sharding.data.materialize import Initializer, seeded_reset
from trainwright.sharding.data.offloading import offloaded_step
from trainwright.sharding.data.optimizers import (
    ELEMENT_WISE,
    NOT_ELEMENT_WISE,
    check_optimizer,
    parameter_groups,
)
from trainwright.sharding.data.order import GatherOrderWarning
from trainwright.sharding.data.ownership import piece_spec_on
from trainwright.sharding.data.parallel import data_parallel
from trainwright.sharding.data.piece import Piece
from trainwright.sharding.data.policy import ShardPolicy
from trainwright.sharding.data.publication import UnchangedWeightsWarning
from trainwright.sharding.data.replicas import check_replicas
from trainwright.sharding.data.selection import trained_specs
from trainwright.sharding.data.state_dict import full_state_dict, piece_state_dict
from trainwright.sharding.data.unit import Unit
from trainwright.sharding.data.units import UnitRule, by_class, by_name, by_size
from trainwright.sharding.data.vocabularies import Translation
from trainwright.sharding.data.vocabulary_deepspeed import policy_from_deepspeed
from trainwright.sharding.data.vocabulary_fsdp import policy_from_fsdp
from trainwright.sharding.data.vocabulary_offload import (
    OFFLOAD_BLOCKS,
    AskedOffload,
    offload_from_deepspeed,
)
from trainwright.sharding.data.whole_matrices import WholeMatrices

__all__ = [
    "DEEPSPEED_REASONS",
    "ELEMENT_WISE",
    "NOT_ELEMENT_WISE",
    "OFFLOAD_BLOCKS",
    "AskedOffload",
    "BucketLayout",
    "DataParallel",
    "GatherOrderWarning",
    "GroupKey",
    "GroupLayout",
    "Initializer",
    "LifecycleError",
    "ParameterRange",
    "Piece",
    "ShardPolicy",
    "Translation",
    "UnchangedWeightsWarning",
    "Unit",
    "UnitRule",
    "WholeMatrices",
    "by_class",
    "by_name",
    "by_size",
    "check_optimizer",
    "check_replicas",
    "data_parallel",
    "dtensor_state_dict",
    "full_state_dict",
    "load_full",
    "offload_from_deepspeed",
    "offloaded_step",
    "parameter_groups",
    "piece_spec_on",
    "piece_state_dict",
    "policy_from_deepspeed",
    "policy_from_fsdp",
    "seeded_reset",
    "trained_specs",
]
