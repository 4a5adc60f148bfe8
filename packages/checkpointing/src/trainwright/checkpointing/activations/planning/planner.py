"""One entrance to both planners."""

from __future__ import annotations

from trainwright.checkpointing.errors import PlanError

from .chain import plan_chain
from .costs import ChainCosts, Costs, OperatorCosts
from .operators import plan_operators
from .plan import Plan


def plan(costs: Costs, budget_bytes: int, *, steps: int = 500) -> Plan:
    """Return the fastest plan within a budget: see `plan_chain` and `plan_operators`.

    Args:
        costs: Of a chain of layers, or of a graph of operators.
        budget_bytes: For a chain, the peak; for operators, what is held after the forward.
        steps: For a chain, memory sizes that are told apart.

    Raises:
        InfeasibleBudgetError: No plan stays within the budget; the smallest that can is named.
        PlanError: An argument is out of range.
    """
    if isinstance(costs, ChainCosts):
        return plan_chain(costs, budget_bytes, steps=steps)
    if isinstance(costs, OperatorCosts):
        return plan_operators(costs, budget_bytes)
    raise PlanError(f"plan needs ChainCosts or OperatorCosts, got {type(costs).__name__}")
