"""The planner of operators: which results to keep, each operator running at most once more."""

from __future__ import annotations

import math
from itertools import combinations

from trainwright.checkpointing.errors import InfeasibleBudgetError

from . import checks
from .costs import OperatorCosts
from .operator_graph import DecisionGraph, relax
from .operator_search import Found, fastest
from .plan import Claims, OperatorDecision, OperatorPlan
from .simulate_operators import simulate_operators


def plan_operators(costs: OperatorCosts, budget_bytes: int) -> OperatorPlan:
    """Return what to keep of a graph, and what to recompute, so that it takes least time.

    The budget is for what is held when the forward has ended. The backward gets the results that
    it needs, and those that their recomputation reads, kept or recomputed; each operator is
    recomputed at most once. Where all that is needed fits, it is kept. Otherwise, of the plans of
    least time, the one of fewest bytes is returned. Bytes are not rounded. ``claims.gap_s`` is 0,
    which is a proof, unless the graph is so large that the search had to drop some of its way.

    Args:
        costs: Of the operators. Where results share a storage, list them as one operator.
        budget_bytes: For the results kept.

    Raises:
        InfeasibleBudgetError: What cannot be recomputed does not fit; the smallest budget is named.
        PlanError: The budget is no number of bytes, or the graph is too entangled to search.
    """
    checks.budget(budget_bytes)
    everything = _keep_all(costs)
    if simulate_operators(everything, costs).held_bytes <= budget_bytes:
        return _claim(everything, costs, budget_bytes, 0.0)
    best: tuple[float, int, OperatorPlan] | None = None
    bound = math.inf
    least: list[int] = []
    for stores in _store_sets(costs):
        staging = sum(c.staging_bytes for c in costs.choices if c.name in stores)
        graph = DecisionGraph(costs, stores)
        least.append(staging + relax(graph, 0.0, 1.0).num_bytes)
        found = _found(graph, costs, budget_bytes - staging)
        if found is None:
            continue
        bound = min(bound, found.bound_s)
        ranked = found.time_s, found.num_bytes, _plan(costs, found)
        if best is None or ranked[:2] < best[:2]:
            best = ranked
    if best is None:
        raise InfeasibleBudgetError(
            f"no plan of {len(costs.operators)} operators stays within {budget_bytes} bytes; "
            f"the smallest budget that can be met is {min(least)} bytes",
            min(least),
        )
    return _claim(best[2], costs, budget_bytes, bound)


def _found(graph: DecisionGraph, costs: OperatorCosts, budget_bytes: int) -> Found | None:
    if budget_bytes < 0:
        return None
    sizes = [step.num_bytes for level in graph.levels for steps in level for step in steps]
    common = math.gcd(*sizes) or 1
    return fastest(graph, budget_bytes // common * common)  # tighter, and no plan is lost


def _keep_all(costs: OperatorCosts) -> OperatorPlan:
    return OperatorPlan(
        OperatorDecision(operator.name, "keep" if operator.needed else "drop")
        for operator in costs.operators
    )


def _plan(costs: OperatorCosts, found: Found) -> OperatorPlan:
    decided = zip(reversed(costs.operators), found.steps, strict=True)
    decisions = [OperatorDecision(each.name, step.action, step.store) for each, step in decided]
    return OperatorPlan(reversed(decisions))


def _claim(
    plan: OperatorPlan, costs: OperatorCosts, budget_bytes: int, bound_s: float
) -> OperatorPlan:
    found = simulate_operators(plan, costs)
    claims = Claims(found.time_s, min(bound_s, found.time_s), found.held_bytes, budget_bytes)
    return OperatorPlan(plan.decisions, claims=claims)


def _store_sets(costs: OperatorCosts) -> list[frozenset[str]]:
    """Return the sets of choices to weigh: with and without each one that needs staging."""
    free = frozenset(choice.name for choice in costs.choices if not choice.staging_bytes)
    staged = [choice.name for choice in costs.choices if choice.staging_bytes]
    return [free.union(names) for k in range(len(staged) + 1) for names in combinations(staged, k)]
