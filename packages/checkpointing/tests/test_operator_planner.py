"""The planner of operators is exact, also where results depend on results."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainwright.checkpointing.activations.planning import (
    Compress,
    Offload,
    OperatorCost,
    OperatorCosts,
    plan_operators,
    simulate_operators,
)
from trainwright.checkpointing.errors import InfeasibleBudgetError, PlanError
from trainwright.checkpointing.testing.plans import operator_costs, operator_plans


@given(operator_costs(3))
@example(OperatorCosts([]))
def test_no_plan_of_a_small_graph_is_faster(costs):
    outcomes = []
    for each in operator_plans(costs):
        try:
            outcome = simulate_operators(each, costs)
        except PlanError:
            continue
        outcomes.append((outcome.time_s, outcome.held_bytes))
    least = min(held for _, held in outcomes)
    total = sum(each.output_bytes for each in costs.operators if each.needed)

    for budget in range(least, total + 2, 2):
        made = plan_operators(costs, budget)
        found = simulate_operators(made, costs)
        best = min(time_s for time_s, held in outcomes if held <= budget)
        assert found.time_s == made.claims.time_s == pytest.approx(best)
        assert found.held_bytes == made.claims.peak_bytes <= budget
        assert made.claims.gap_s == 0
    if least:
        with pytest.raises(InfeasibleBudgetError) as caught:
            plan_operators(costs, least - 1)
        assert caught.value.smallest_budget_bytes == least


@given(operator_costs(12), st.integers(0, 40), st.integers(0, 40))
def test_more_memory_never_takes_more_time(costs, budget, more):
    try:
        tight = plan_operators(costs, budget)
    except InfeasibleBudgetError as error:
        tight = plan_operators(costs, budget := error.smallest_budget_bytes)

    assert plan_operators(costs, budget + more).claims.time_s <= tight.claims.time_s + 1e-9


@given(operator_costs(12), st.integers(0, 40))
def test_random_operators_are_kept_for_every_budget(costs, budget):
    try:
        made = plan_operators(costs, budget)
    except InfeasibleBudgetError as error:
        made = plan_operators(costs, error.smallest_budget_bytes)
    fixed = {each.name for each in costs.operators if not each.recomputable}

    assert not fixed & set(made.recomputed)
    assert {each.name for each in costs.operators if each.needed} <= {*made.kept, *made.recomputed}


def test_what_a_recomputation_reads_is_kept_or_recomputed_too():
    # Only `c` is needed; it reads `b`, which reads `a`.
    chain = [OperatorCost("a", 5, 1, needed=False), OperatorCost("b", 3, 2, ["a"], needed=False)]
    costs = OperatorCosts([*chain, OperatorCost("c", 1, 10, ["b"])])

    assert str(plan_operators(costs, 10)) == "c"
    assert str(plan_operators(costs, 2)) == "b (c)"
    assert str(plan_operators(costs, 1)) == "a (b) (c)"
    assert str(plan_operators(costs, 0)) == "(a) (b) (c)"


def test_of_equally_fast_plans_the_smallest_is_taken():
    costs = OperatorCosts([OperatorCost("free", 0, 5), OperatorCost("dear", 3, 5)])

    assert plan_operators(costs, 9).claims.peak_bytes == 5
    assert plan_operators(costs, 10).claims.peak_bytes == 10  # all fits, so all is kept


def test_offload_and_compression_compete_with_recomputation():
    offers = [Offload("cpu", 10.0, 10.0), Compress("half", 0.5, 40.0, 40.0)]
    operators = [OperatorCost("dear", 9.0, 10), OperatorCost("cheap", 0.1, 10)]
    costs = OperatorCosts(operators, offers)

    assert str(plan_operators(costs, 10)) == "dear (cheap)"
    assert str(plan_operators(costs, 5)) == "dear@half (cheap)"
    assert str(plan_operators(costs, 0)) == "dear@cpu (cheap)"


def test_hundreds_of_operators_are_planned_with_a_proof():
    numbers = random.Random(3)
    operators = []
    for k in range(300):
        reads = {f"o{max(0, k - numbers.choice([1, 1, 2, 5]))}" for _ in range(2)} if k else ()
        needed = numbers.random() < 0.7
        size = numbers.randint(10**5, 10**7)
        operators.append(
            OperatorCost(f"o{k}", numbers.uniform(0.1, 4), size, sorted(reads), needed=needed)
        )
    costs = OperatorCosts(operators)

    made = plan_operators(costs, 5 * 10**8)

    assert made.claims.gap_s == 0
    assert simulate_operators(made, costs).time_s == made.claims.time_s
