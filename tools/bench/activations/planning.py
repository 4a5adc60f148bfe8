"""How long the planners take, and how much rounding can have cost their plans."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import attrs

from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    Choice,
    Compress,
    LayerCost,
    Offload,
    OperatorCost,
    OperatorCosts,
    Plan,
    plan_chain,
    plan_operators,
)

TARGET_S = 10.0


@attrs.frozen
class Outcome:
    """One plan, and what it took.

    Args:
        case: What was planned.
        seconds: Of planning.
        slowdown: Time of the plan over that of keeping all.
        gap: Part of the plan's time by which a better one could win at most.
        spare: Part of the budget that the plan leaves.
    """

    case: str
    seconds: float
    slowdown: float
    gap: float
    spare: float


def run(num_layers: int, steps: int) -> list[Outcome]:
    """Plan chains of drawn layers, and a graph of drawn operators, at tenths of all bytes."""
    offers: list[Choice] = [Offload("cpu", 1e10, 1e10, overlap=0.5, staging_bytes=10**8)]
    offers.append(Compress("int8", 0.26, 2e10, 4e10))
    found = []
    for name, choices in (("chain", []), ("chain, choices", offers)):
        costs = chain(num_layers, choices)
        total = sum(layer.saved_bytes + layer.output_bytes for layer in costs.layers)
        plain_s = sum(layer.forward_s + layer.backward_s for layer in costs.layers)
        for tenths in (1, 3):
            found.append(
                _time(
                    f"{name}, {tenths}/10",
                    lambda costs=costs, b=total * tenths // 10: plan_chain(costs, b, steps=steps),
                    plain_s,
                )
            )
    graph = operators(2 * num_layers)
    total = sum(each.output_bytes for each in graph.operators if each.needed)
    plain_s = 3 * sum(each.forward_s for each in graph.operators)
    found.append(
        _time("operators, 3/10", lambda: plan_operators(graph, total * 3 // 10), plain_s, plain_s)
    )
    return found


def chain(num_layers: int, choices: list[Choice]) -> ChainCosts:
    """Draw layers of 1 to 5 ms that save 10 to 60 MB and give 2 to 4 MB."""
    draw = random.Random(0)
    layers = [
        LayerCost(
            f"layer {number}",
            draw.uniform(1e-3, 5e-3),
            draw.uniform(2e-3, 10e-3),
            draw.randint(2 * 10**6, 4 * 10**6),
            draw.randint(10**7, 6 * 10**7),
        )
        for number in range(num_layers)
    ]
    return ChainCosts(layers, 2 * 10**6, choices)


def operators(count: int) -> OperatorCosts:
    """Draw operators that read results of up to five before."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        back = [draw.choice([1, 1, 2, 5]) for _ in range(2)]
        reads = sorted({f"o{max(0, number - k)}" for k in back}) if number else []
        size, needed = draw.randint(10**5, 10**7), draw.random() < 0.7
        seconds = draw.uniform(1e-4, 4e-3)
        found.append(OperatorCost(f"o{number}", seconds, size, reads, needed=needed))
    return OperatorCosts(found)


def _time(case: str, make: Callable[[], Plan], plain_s: float, base_s: float = 0.0) -> Outcome:
    start = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - start
    claims = made.claims
    assert claims is not None
    whole = base_s + claims.time_s
    return Outcome(
        case,
        seconds,
        whole / plain_s,
        claims.gap_s / whole,
        claims.spare_bytes / claims.budget_bytes,
    )
