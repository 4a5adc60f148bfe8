"""Planning: costs as values, plans as data, and planners that prove how good their plans are.

Nothing here imports torch, except `profile`, which measures costs.
"""

from .chain import plan_chain
from .choices import Choice, Compress, Offload, Partial
from .costs import ChainCosts, Costs, LayerCost, OperatorCost, OperatorCosts
from .operators import plan_operators
from .plan import (
    ChainPlan,
    Claims,
    Item,
    Kept,
    OperatorDecision,
    OperatorPlan,
    Plan,
    Region,
    layers_of,
)
from .planner import plan
from .presets import (
    every_plan,
    keep_all_plan,
    recompute_all_plan,
    recursive_plan,
    sqrt_plan,
    sqrt_segments,
)
from .profile import profile
from .profile_operators import profile_operators
from .simulate import Simulation, simulate, simulate_chain
from .simulate_operators import OperatorSimulation, simulate_operators
from .stored import costs_from_json, costs_to_json, plan_from_json, plan_to_json

__all__ = [
    "ChainCosts",
    "ChainPlan",
    "Choice",
    "Claims",
    "Compress",
    "Costs",
    "Item",
    "Kept",
    "LayerCost",
    "Offload",
    "OperatorCost",
    "OperatorCosts",
    "OperatorDecision",
    "OperatorPlan",
    "OperatorSimulation",
    "Partial",
    "Plan",
    "Region",
    "Simulation",
    "costs_from_json",
    "costs_to_json",
    "every_plan",
    "keep_all_plan",
    "layers_of",
    "plan",
    "plan_chain",
    "plan_from_json",
    "plan_operators",
    "plan_to_json",
    "profile",
    "profile_operators",
    "recompute_all_plan",
    "recursive_plan",
    "simulate",
    "simulate_chain",
    "simulate_operators",
    "sqrt_plan",
    "sqrt_segments",
]
