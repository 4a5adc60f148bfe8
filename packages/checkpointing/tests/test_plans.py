"""Plans are data: printed, stored, compared, simulated."""

import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    ChainPlan,
    Compress,
    Kept,
    LayerCost,
    Offload,
    OperatorCost,
    OperatorCosts,
    OperatorDecision,
    OperatorPlan,
    Partial,
    Region,
    costs_from_json,
    costs_to_json,
    every_plan,
    keep_all_plan,
    plan,
    plan_from_json,
    plan_to_json,
    recompute_all_plan,
    recursive_plan,
    simulate,
    sqrt_plan,
)
from trainwright.checkpointing.errors import InfeasibleBudgetError, PlanError
from trainwright.checkpointing.testing.plans import chain_costs, choice_lists, operator_costs

UNIT = LayerCost("unit", 1, 2, 1, 1, output_saved=True)


def test_a_plan_prints_regions_in_parentheses_and_choices_after_an_at_sign():
    made = ChainPlan([Kept(0), Kept(1, "cpu"), Region([Kept(2), Region([Kept(3)])], "int8")])

    assert str(made) == "0 1@cpu (2 (3))@int8"
    assert str(OperatorPlan([OperatorDecision("mm", "recompute")])) == "(mm)"


def test_presets_are_plans():
    assert str(keep_all_plan(3)) == "0 1 2"
    assert str(recompute_all_plan(3)) == "(0) (1) (2)"
    assert str(every_plan(7, 3)) == "(0 1 2) (3 4 5) (6)"
    assert str(sqrt_plan(12)) == "(0 1 2 3) (4 5 6 7) (8 9 10 11)"
    assert str(recursive_plan(8)) == "(((0) 1) (2) 3) ((4) 5) (6) 7"


@given(chain_costs(4, choice_lists()) | operator_costs(4), st.integers(0, 60))
def test_plans_and_costs_come_back_equal_from_json(costs, budget):
    assert costs_from_json(costs_to_json(costs)) == costs
    try:
        made = plan(costs, budget)
    except InfeasibleBudgetError as error:
        made = plan(costs, error.smallest_budget_bytes)

    back = plan_from_json(plan_to_json(made))

    assert back == made
    assert back.claims == made.claims
    assert str(back) == str(made)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"kind": "tree", "claims": null}',
        '{"kind": "chain", "claims": null}',
        '{"kind": "chain", "claims": null, "items": [[1, ""]]}',
    ],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        plan_from_json(text)
    with pytest.raises(PlanError):
        costs_from_json(text)


OPERATOR = '{"kind": "operators", "claims": null, "choices": [], %s}'


@pytest.mark.parametrize(
    "text",
    [
        OPERATOR % '"decisions": [[1, "keep", ""]]',
        OPERATOR % '"decisions": [["mm", "keep", null]]',
        OPERATOR % '"operators": [{"name": 1, "forward_s": 1, "output_bytes": 1}]',
        OPERATOR % '"operators": [{"name": "a", "forward_s": 1, "output_bytes": 1, "needed": 0}]',
        '{"kind": "chain", "items": [[0, ""]], "claims": {"time_s": NaN, "lower_bound_s": 0, '
        '"peak_bytes": 1, "budget_bytes": 1}}',
        '{"kind": "chain", "items": [[0, ""]], "claims": {"time_s": 1, "lower_bound_s": 0, '
        '"peak_bytes": [], "budget_bytes": 1}}',
    ],
)
def test_a_plan_with_a_value_of_another_type_is_refused_when_it_is_read(text):
    with pytest.raises(PlanError):
        plan_from_json(text)
    with pytest.raises(PlanError):
        costs_from_json(text)


def test_a_message_can_be_printed_whatever_the_file_names():
    with pytest.raises(PlanError, match=r"\\ud800") as caught:
        costs_from_json('{"choices": [{"kind": "offload", "\\ud800": 1}]}')
    assert str(caught.value).encode()


def test_plans_are_equal_by_what_they_do_not_by_what_they_claim():
    made = plan(ChainCosts([UNIT] * 3, 1), 100)

    assert made == keep_all_plan(3)
    assert made.claims is not None
    assert len({made, keep_all_plan(3)}) == 1
    assert attrs.evolve(made, claims=None) == made


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChainPlan([]),
        lambda: ChainPlan([Kept(1)]),
        lambda: ChainPlan([Kept(0), Kept(0)]),
        lambda: ChainPlan([Region([])]),
        lambda: ChainPlan([Region([Kept(0, "cpu")])]),
        lambda: Kept(-1),
        lambda: Kept(0, "no name"),
        lambda: LayerCost("l", -1, 0, 0, 0),
        lambda: LayerCost("l", float("nan"), 0, 0, 0),
        lambda: LayerCost("l", 0, 0, 1.5, 0),
        lambda: LayerCost("l", 0, 0, 2, 1, output_saved=True),
        lambda: LayerCost("l", 0, 0, 0, 1, compressible_bytes=2),
        lambda: LayerCost("l", 0, 0, 0, 1, partials=[Partial("p", 2, 0)]),
        lambda: ChainCosts([], 0),
        lambda: ChainCosts([UNIT], True),
        lambda: ChainCosts([UNIT], 0, [Compress("a", 0.5, 1, 1), Offload("a", 1, 1)]),
        lambda: Compress("c", 0.0, 1, 1),
        lambda: Offload("o", 1, 1, overlap=1.5),
        lambda: OperatorCosts([OperatorCost("a", 0, 0, ["b"]), OperatorCost("b", 0, 0)]),
        lambda: OperatorCosts([OperatorCost("a", 0, 0), OperatorCost("a", 0, 0)]),
        lambda: every_plan(3, 0),
        lambda: plan(ChainCosts([UNIT], 0), 1.0),
        lambda: plan(ChainCosts([UNIT], 0), 1, steps=0),
        lambda: plan([UNIT], 1),
    ],
)
def test_values_that_make_no_sense_are_refused(make):
    with pytest.raises(PlanError):
        make()


def test_a_plan_that_cannot_be_run_is_refused_by_name():
    random = LayerCost("dropout", 1, 1, 1, 1, recomputable=False)
    with pytest.raises(PlanError, match="dropout"):
        simulate(every_plan(1, 1), ChainCosts([random], 1))
    with pytest.raises(PlanError, match="2 layers"):
        simulate(keep_all_plan(2), ChainCosts([UNIT], 1))
    with pytest.raises(PlanError, match="cpu"):
        simulate(ChainPlan([Kept(0, "cpu")]), ChainCosts([UNIT], 1))
    with pytest.raises(PlanError, match="go with"):
        simulate(keep_all_plan(1), OperatorCosts([]))


@pytest.mark.parametrize("action", ["drop", "recompute"])
def test_a_plan_of_operators_must_give_the_backward_what_it_reads(action):
    costs = OperatorCosts([OperatorCost("rand", 1, 1, recomputable=False)])
    with pytest.raises(PlanError, match="rand"):
        simulate(OperatorPlan([OperatorDecision("rand", action)]), costs)


def test_a_plan_that_recomputes_what_nobody_reads_is_refused():
    costs = OperatorCosts([OperatorCost("idle", 1, 1, needed=False)])
    with pytest.raises(PlanError, match="idle"):
        simulate(OperatorPlan([OperatorDecision("idle", "recompute")]), costs)


def test_an_infeasible_budget_survives_pickling():
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan(ChainCosts([UNIT] * 4, 1), 1)
    again = pickle.loads(pickle.dumps(caught.value))

    assert str(again) == str(caught.value)
    assert again.smallest_budget_bytes == caught.value.smallest_budget_bytes == 3


def test_a_region_runs_twice_and_holds_its_input_only():
    costs = ChainCosts([UNIT] * 4, 1)

    found = simulate(every_plan(4, 2), costs)

    assert found.runs == (2, 2, 2, 2)
    assert found.time_s == 4 * (1 + 1 + 2)
    assert found.held_bytes == 2
    assert found.peak_bytes == 2 + 2  # both inputs, and what two layers save
