"""Optimizers by name or of your own, over what a rank keeps of a model, and their states."""

from trainwright.integration.optimizers.joined import JoinedOptimizer, Member, build, offloaded
from trainwright.integration.optimizers.lion import Lion
from trainwright.integration.optimizers.named import (
    OPTIMIZERS,
    Named,
    Options,
    adamw,
    check_options,
    named,
    named_plan,
)
from trainwright.integration.optimizers.plans import (
    Factory,
    OptimizerPlan,
    Sees,
    Share,
    element_wise,
    is_hidden_matrix,
    plan_of,
    whole_matrices,
    whole_parameters,
)
from trainwright.integration.optimizers.states import (
    Filling,
    Held,
    held,
    materialise,
    put_back,
    snapshot,
    tree,
)

__all__ = [
    "OPTIMIZERS",
    "Factory",
    "Filling",
    "Held",
    "JoinedOptimizer",
    "Lion",
    "Member",
    "Named",
    "OptimizerPlan",
    "Options",
    "Sees",
    "Share",
    "adamw",
    "build",
    "check_options",
    "element_wise",
    "held",
    "is_hidden_matrix",
    "materialise",
    "named",
    "named_plan",
    "offloaded",
    "plan_of",
    "put_back",
    "snapshot",
    "tree",
    "whole_matrices",
    "whole_parameters",
]
