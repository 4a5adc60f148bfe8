"""Published numbers on recomputation: Revolve, square roots, memory budgets, memory formulas."""

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest

from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    LayerCost,
    OperatorCost,
    OperatorCosts,
    every_plan,
    keep_all_plan,
    plan_chain,
    plan_operators,
    recompute_all_plan,
    recursive_plan,
    simulate_chain,
    simulate_operators,
    sqrt_plan,
    sqrt_segments,
)

PUBLISHED = json.loads((Path(__file__).parent / "published_recomputation.json").read_text())
GIB = 2**30
LONG = pytest.mark.long
MIB = 2**20


@pytest.mark.parametrize(
    "length", [2, 3, 4, 5, 8, 10, 16, 24, *(pytest.param(n, marks=LONG) for n in (32, 48, 64))]
)
def test_unit_chains_take_the_forwards_of_revolves_table(length):
    # One layer's activations fit beside the slots, those of two never do.
    inner = 20
    for num_layers, slots, forwards, most in PUBLISHED["revolve"]:
        if num_layers != length:
            continue
        costs = ChainCosts([LayerCost("step", 1, 0, 1, inner)] * num_layers, 0)

        made = plan_chain(costs, inner + slots)

        found = simulate_chain(made, costs)
        assert found.time_s - num_layers == forwards, (num_layers, slots)
        assert max(found.runs) - 1 == most, (num_layers, slots)
        assert made.claims.gap_s == 0


@pytest.mark.parametrize(("num_layers", "slots"), [(7, 1), (20, 3), (37, 4)])
def test_unit_chains_follow_revolves_closed_form(num_layers, slots):
    repeats = next(r for r in range(99) if math.comb(slots + r, slots) >= num_layers)
    forwards = repeats * num_layers - math.comb(slots + repeats, slots + 1)
    costs = ChainCosts([LayerCost("step", 1, 0, 1, 20)] * num_layers, 0)

    assert plan_chain(costs, 20 + slots).claims.time_s - num_layers == forwards


@pytest.mark.parametrize(("num_layers", "segments", "peak"), PUBLISHED["sqrt"])
def test_square_roots_take_the_printed_peak(num_layers, segments, peak):
    costs = ChainCosts([LayerCost("layer", 1, 2, 1, 1, output_saved=True)] * num_layers, 1)

    found = simulate_chain(sqrt_plan(num_layers), costs)

    assert sqrt_segments(num_layers) == segments
    assert found.peak_bytes == peak
    assert found.time_s == num_layers * (1 + 1 + 2)  # one forward more: a third


@pytest.mark.parametrize(("inner", "boundary"), [(16, 1), (34, 2), (100, 4)])
def test_the_best_number_of_segments_is_the_root_of_layers_times_inner_over_input(inner, boundary):
    found = sqrt_segments(400, layer_bytes=inner, input_bytes=boundary)

    def peak(segments):
        return segments * boundary + 400 / segments * inner

    assert peak(found) <= 1.02 * peak(math.sqrt(400 * inner / boundary))


@pytest.mark.parametrize("num_layers", [8, 64, 256])
def test_the_recursion_needs_a_logarithm_of_memory_and_of_forwards(num_layers):
    costs = ChainCosts([LayerCost("layer", 1, 0, 1, 1, output_saved=True)] * num_layers, 1)

    found = simulate_chain(recursive_plan(num_layers), costs)

    levels = int(math.log2(num_layers))
    assert found.peak_bytes <= levels + 2
    assert found.time_s == num_layers + num_layers * levels / 2


def _products(weights=(1,) * 5):
    """x.cos(), then pairs of a product and a cosine; sizes in MiB, times in products."""
    operators = [OperatorCost("cos0", 0, MIB)]
    for k, weight in enumerate(weights, 1):
        operators.append(OperatorCost(f"mm{k}", weight, weight * MIB, [f"cos{k - 1}"]))
        operators.append(OperatorCost(f"cos{k}", 0, weight * MIB, [f"mm{k}"], needed=k < 5))
    return OperatorCosts(operators)


@pytest.mark.parametrize(("budget", "memory", "products"), PUBLISHED["chain_of_products"])
def test_a_chain_of_products_keeps_the_printed_memory(budget, memory, products):
    made = plan_operators(_products(), int(budget * 10 * MIB))

    assert made.claims.peak_bytes == memory * MIB
    assert made.claims.time_s == products
    assert made.claims.gap_s == 0


def test_a_cheap_operator_is_recomputed_before_anything_is_kept():
    costs = OperatorCosts(
        [OperatorCost("cos", 0, MIB), OperatorCost("mm", 1, MIB, ["cos"], needed=False)]
    )

    assert plan_operators(costs, MIB).claims.peak_bytes == MIB
    half = plan_operators(costs, MIB // 2)
    assert (half.claims.peak_bytes, half.claims.time_s, half.recomputed) == (0, 0, ("cos",))


def test_independent_products_are_a_knapsack():
    table = PUBLISHED["knapsack"]
    operators = [OperatorCost(f"mm{w}", w, w * MIB) for w in table["weights"]]
    for budget, memory in table["cases"]:
        made = plan_operators(OperatorCosts(operators), budget * MIB)

        assert made.claims.peak_bytes == memory * MIB
        assert made.claims.time_s == sum(table["weights"]) - memory


def test_the_cheaper_of_two_products_is_recomputed():
    pairs = [(1, 4), (2, 2)]
    operators = [OperatorCost(f"mm{b}", b * b * o, b * o * MIB) for b, o in pairs]

    made = plan_operators(OperatorCosts(operators), 4 * MIB)

    assert sum(each.output_bytes for each in operators) == 8 * MIB
    assert (made.claims.peak_bytes, made.claims.time_s) == (4 * MIB, 4)


@pytest.mark.parametrize(
    ("length", "width", "budget", "eager", "memory", "recomputed"), PUBLISHED["attention"]
)
def test_attention_is_recomputed_only_if_it_is_cheaper_than_the_product(
    length, width, budget, eager, memory, recomputed
):
    size = length * width * MIB
    attention = OperatorCost("attn", 2 * length * length * width, size)
    product = OperatorCost("mm", length * width * width, size, ["attn"])
    costs = OperatorCosts([attention, product])

    made = plan_operators(costs, int(Fraction(str(budget)) * eager * MIB))

    assert simulate_operators(plan_operators(costs, eager * MIB), costs).held_bytes == eager * MIB
    assert made.claims.peak_bytes == memory * MIB
    assert made.recomputed == (recomputed,)


def test_checkpoints_and_working_memory_follow_zero_infinitys_formulas():
    batch, seq, hidden, heads, every, layers = 4, 1024, 2048, 16, 4, 32
    boundary = 2 * batch * seq * hidden
    working = batch * seq * (16 * hidden + 2 * heads * seq)
    costs = ChainCosts([LayerCost("block", 1, 2, boundary, working)] * layers, boundary)

    found = simulate_chain(every_plan(layers, every), costs)

    assert found.held_bytes == 2 * batch * seq * hidden * layers // every
    inner = found.peak_bytes - found.held_bytes
    assert inner == every * working + (every - 1) * boundary  # and the inputs within the region


def test_a_llama_of_8_billion_weights_takes_the_printed_gibibytes():
    hidden_state = 2 * 32768 * 4096
    logits = 4 * 32768 * 128256
    layer = LayerCost("block", 1, 2, hidden_state, 27 * hidden_state)  # 28 copies, its input one
    costs = ChainCosts([layer] * 32, hidden_state)

    kept = simulate_chain(keep_all_plan(32), costs)
    full = simulate_chain(recompute_all_plan(32), costs)

    assert hidden_state / GIB == 0.25
    assert round(logits / GIB, 1) == 15.7
    assert kept.peak_bytes / GIB == 224
    assert round((kept.peak_bytes + logits) / GIB) == 240
    assert full.held_bytes / GIB == 8
    # The text adds a whole layer of 7 GiB, whose input it has counted among the 8 already.
    assert round((full.peak_bytes + hidden_state + logits) / GIB) == 31


def test_selective_recomputation_takes_the_printed_parts_of_activations():
    heads, hidden, seq, tp = 96, 12288, 2048, 8
    baseline = 10 + 24 / tp + 5 * heads * seq / (hidden * tp)
    attention = 5 * heads * seq / (hidden * tp)

    assert round(100 * (baseline - attention) / baseline, 1) == pytest.approx(56.5, abs=0.1)
