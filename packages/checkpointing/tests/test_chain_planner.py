"""The planner of chains is exact, keeps its promises, and says how much rounding may cost."""

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    Compress,
    LayerCost,
    Offload,
    plan_chain,
    simulate_chain,
)
from trainwright.checkpointing.errors import InfeasibleBudgetError, PlanError
from trainwright.checkpointing.testing.plans import chain_costs, chain_plans, choice_lists

FINE = 10**6


def _outcomes(costs):
    """Return peak and time of every plan."""
    stores = [choice.name for choice in costs.choices]
    stores += sorted({partial.name for layer in costs.layers for partial in layer.partials})
    found = []
    for each in chain_plans(len(costs.layers), stores):
        try:
            outcome = simulate_chain(each, costs)
        except PlanError:  # recomputes what cannot be, or a layer does not offer it
            continue
        found.append((outcome.peak_bytes, outcome.time_s))
    return found


def _claim_optimal(costs, steps):
    outcomes = _outcomes(costs)
    least, most = min(outcomes)[0], max(outcomes)[0]
    budgets = sorted({peak for peak, _ in outcomes} | {most + 1})
    for budget in budgets[:: max(1, len(budgets) // 6)]:
        made = plan_chain(costs, budget, steps=steps)
        found = simulate_chain(made, costs)
        best = min(time_s for peak, time_s in outcomes if peak <= budget)
        assert made.claims.time_s == found.time_s
        assert made.claims.peak_bytes == found.peak_bytes <= budget
        assert made.claims.lower_bound_s <= best + 1e-9
        assert best <= found.time_s + 1e-9
        assert found.time_s - best <= made.claims.gap_s + 1e-9
        if steps == FINE:
            assert found.time_s == pytest.approx(best)
            assert made.claims.gap_s == 0
    if least:
        with pytest.raises(InfeasibleBudgetError) as caught:
            plan_chain(costs, least - 1, steps=steps)
        assert caught.value.smallest_budget_bytes == least


@given(chain_costs(4))
@example(ChainCosts([LayerCost("none", 0, 0, 0, 0)], 0))
def test_no_plan_of_a_small_chain_is_faster(costs):
    _claim_optimal(costs, FINE)


@given(chain_costs(2, choice_lists()))
def test_no_plan_with_offload_compression_and_partial_layers_is_faster(costs):
    _claim_optimal(costs, FINE)


@pytest.mark.long
@settings(max_examples=2)
@given(chain_costs(6))
def test_no_plan_of_six_layers_is_faster(costs):
    _claim_optimal(costs, FINE)


@given(chain_costs(3), st.integers(1, 9))
def test_rounding_costs_no_more_than_the_gap_that_is_reported(costs, steps):
    _claim_optimal(costs, steps)


@given(chain_costs(12, choice_lists()), st.integers(0, 120))
def test_the_simulator_finds_what_the_planner_claims(costs, budget):
    try:
        made = plan_chain(costs, budget, steps=50)
    except InfeasibleBudgetError as error:
        made = plan_chain(costs, error.smallest_budget_bytes, steps=50)
    found = simulate_chain(made, costs)

    assert found.peak_bytes == made.claims.peak_bytes <= made.claims.budget_bytes
    assert found.time_s == made.claims.time_s
    assert made.claims.lower_bound_s <= made.claims.time_s
    assert made.claims.spare_bytes >= 0


@given(chain_costs(8, choice_lists()), st.integers(0, 60), st.integers(0, 60))
def test_more_memory_never_takes_more_time(costs, budget, more):
    try:
        tight = plan_chain(costs, budget, steps=FINE)
    except InfeasibleBudgetError:
        assume(False)
    loose = plan_chain(costs, budget + more, steps=FINE)

    assert loose.claims.time_s <= tight.claims.time_s + 1e-9


@given(chain_costs(8), st.integers(0, 60))
def test_a_layer_that_cannot_be_recomputed_runs_once(costs, budget):
    try:
        made = plan_chain(costs, budget)
    except InfeasibleBudgetError as error:
        made = plan_chain(costs, error.smallest_budget_bytes)
    runs = simulate_chain(made, costs).runs

    assert all(runs[k] == 1 for k, layer in enumerate(costs.layers) if not layer.recomputable)


@given(chain_costs(8))
def test_where_all_fits_all_is_kept(costs):
    made = plan_chain(costs, 1000)

    assert str(made) == " ".join(map(str, range(len(costs.layers))))
    assert made.claims.gap_s == 0


def test_the_faster_of_offload_compression_and_recomputation_is_chosen():
    dear = LayerCost("dear", 9.0, 1.0, 0, 100)
    cheap = LayerCost("cheap", 0.1, 1.0, 0, 100)
    offers = [Offload("cpu", 100.0, 100.0), Compress("half", 0.5, 400.0, 400.0)]
    costs = ChainCosts([dear, cheap, dear, cheap], 0, offers)

    def chosen(budget_bytes):
        return sorted(str(plan_chain(costs, budget_bytes)).split())

    assert chosen(400) == ["0", "1", "2", "3"]
    assert chosen(300) == ["(1)", "0", "2", "3"]  # a tenth of a second
    assert chosen(250) == ["(1)", "0", "2@half", "3"]  # half a second more
    # No layer runs, and saves 100 bytes, beside what an earlier one left; the last is as it is.
    assert plan_chain(costs, 100).stores == {"cpu"}
    assert plan_chain(costs, 400).claims.time_s + 0.1 == pytest.approx(
        plan_chain(costs, 300).claims.time_s
    )


def test_bytes_in_flight_are_set_aside_only_if_something_is_offloaded():
    layers = [LayerCost("layer", 1.0, 1.0, 0, 100)] * 3
    free = ChainCosts(layers, 0, [Offload("cpu", 1e3, 1e3)])
    staged = ChainCosts(layers, 0, [Offload("cpu", 1e3, 1e3, staging_bytes=100)])

    assert str(plan_chain(free, 200)).count("cpu") == 1
    assert str(plan_chain(staged, 200)) == "0@cpu 1@cpu 2"
    assert str(plan_chain(staged, 299)) == "0@cpu 1@cpu 2"
    assert str(plan_chain(staged, 300)) == "0 1 2"


def test_a_budget_just_above_the_smallest_is_met_although_bytes_are_rounded():
    layers = [LayerCost("layer", 1.0, 1.0, 997, 10007) for _ in range(12)]
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_chain(ChainCosts(layers, 991), 0)
    least = caught.value.smallest_budget_bytes

    made = plan_chain(ChainCosts(layers, 991), least, steps=10)

    assert made.claims.peak_bytes == least == 991 + 997 + 10007
