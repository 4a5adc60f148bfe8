"""Placements: what each rank of an axis holds of a tensor, and what follows from it."""

from trainwright.sharding.placement.parameters import (
    ParameterPlacement,
    placements_of,
    shard_spec,
)
from trainwright.sharding.placement.partial import PartialTensor, mark_partial, terms_of
from trainwright.sharding.placement.replicas import check_replicated, check_replicated_parameters
from trainwright.sharding.placement.transitions import (
    Transition,
    apply_transition,
    plan_redistribution,
    redistribute,
)
from trainwright.sharding.placement.values import Partial, Placement, Replicate, Shard
from trainwright.sharding.placement.watch import ReplicaWatch

__all__ = [
    "ParameterPlacement",
    "Partial",
    "PartialTensor",
    "Placement",
    "ReplicaWatch",
    "Replicate",
    "Shard",
    "Transition",
    "apply_transition",
    "check_replicated",
    "check_replicated_parameters",
    "mark_partial",
    "placements_of",
    "plan_redistribution",
    "redistribute",
    "shard_spec",
    "terms_of",
]
