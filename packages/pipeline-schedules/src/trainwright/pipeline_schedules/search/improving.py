"""Small changes to a complete order, along what makes it late."""

from __future__ import annotations

import math
import random
from collections import deque

import attrs

from trainwright.pipeline_schedules.search.filling import ROUNDING
from trainwright.pipeline_schedules.search.problem import Orders, Problem

_MEMORY = 40
"""How many values back a worse order is still taken."""
_FAR = 12


@attrs.frozen(eq=False)
class Timed:
    """Orders and when they run.

    Attributes:
        value: The objective.
        starts: Of each operation by number.
        after: What each operation waited for last, -1 for nothing.
        last: The operation that ends last, of the rank that decides.
    """

    value: float
    starts: list[float]
    after: list[int]
    last: int


def timed(problem: Problem, orders: Orders) -> Timed | None:
    """Run complete orders; None where ranks wait for each other in a circle."""
    table, cells = problem.table, problem.cells
    ends = [math.inf] * (3 * cells) + [0.0]
    starts = [0.0] * (3 * cells)
    after = [-1] * (3 * cells)
    weights = [cost for cost in problem.costs[2] for _ in range(problem.microbatches)]
    places = [0] * len(orders)
    sleepers: dict[int, int] = {}
    going = list(range(len(orders)))
    while going:
        rank = going.pop()
        order = orders[rank]
        place = places[rank]
        previous = order[place - 1] if place else -1
        now = ends[previous]
        for number in order[place:]:
            if number < 2 * cells:
                need = table.needs[number]
                arrival = ends[need] + table.delay[number]
                cost = table.cost[number]
            else:
                need = number - cells
                arrival = ends[need]
                cost = weights[number - 2 * cells]
            if arrival == math.inf:
                sleepers[need] = rank
                break
            late = arrival > now
            start = arrival if late else now
            after[number] = need if late else previous
            starts[number] = start
            now = ends[number] = start + cost
            previous = number
            place += 1
            if number in sleepers:
                going.append(sleepers.pop(number))
        places[rank] = place
    if sleepers:
        return None
    value, last = -math.inf, -1
    for order in orders:
        length = ends[order[-1]] - (starts[order[0]] if problem.objective == "span" else 0.0)
        if length > value:
            value, last = length, order[-1]
    return Timed(value, starts, after, last)


def improved(
    problem: Problem, orders: Orders, rounds: int, enough: float, seed: int = 0
) -> tuple[float, Orders]:
    """Move operations that make the order late, and keep what helps.

    A change is taken where it is better than what was there some rounds ago (late acceptance), so
    that the search can leave a local optimum. It is the same for the same arguments.

    Args:
        problem: What things cost.
        orders: Complete orders that work.
        rounds: How many changes to try.
        enough: Stop at this value.
        seed: Of the choices.

    Returns:
        The best value and its orders.
    """
    randomness = random.Random(seed)
    current = timed(problem, orders)
    assert current is not None, "the orders to improve work"
    orders = [list(order) for order in orders]
    rank_of = problem.owner
    best, best_orders = current.value, [list(order) for order in orders]
    history = deque([current.value] * _MEMORY)
    critical = _critical(problem, current)
    for _ in range(rounds):
        if best <= enough:
            break
        number = randomness.choice(critical)
        rank = rank_of[number % problem.cells // problem.microbatches]
        changed = _moved(problem, rank, orders[rank], number, randomness)
        if changed is None:
            continue
        kept, orders[rank] = orders[rank], changed
        found = timed(problem, orders)
        if found is None or found.value > max(current.value, history[0]):
            orders[rank] = kept
        else:
            current = found
            critical = _critical(problem, current)
            if current.value < best:
                best, best_orders = current.value, [list(order) for order in orders]
        history.popleft()
        history.append(current.value)
    return best, best_orders


def _critical(problem: Problem, run: Timed) -> list[int]:
    """The operations on the way to the last end, none of which may be later."""
    path = []
    number = run.last
    while number != -1:
        path.append(number)
        number = run.after[number]
    return path


def _moved(
    problem: Problem, rank: int, order: list[int], number: int, randomness: random.Random
) -> list[int] | None:
    """The order with one operation elsewhere; None where needs or memory forbid that."""
    place = order.index(number)
    far = _FAR if number >= 2 * problem.cells else 3
    target = place + randomness.choice((-1, 1)) * randomness.randint(1, far)
    target = min(max(target, 0), len(order) - 1)
    if target == place:
        return None
    low, high = min(place, target), max(place, target)
    passed = order[low:high] if target < place else order[low + 1 : high + 1]
    for other in passed:
        one, two = (other, number) if target < place else (number, other)
        if _same_chain(problem, one, two):
            return None
    changed = order[:place] + order[place + 1 :]
    changed.insert(target, number)
    return changed if _fits(problem, rank, changed) else None


def _same_chain(problem: Problem, one: int, two: int) -> bool:
    """Whether the first must stay before the second, being of the same stage."""
    cells, microbatches = problem.cells, problem.microbatches
    if one % cells == two % cells:
        return True
    same_kind = one // cells == two // cells
    return same_kind and one % cells // microbatches == two % cells // microbatches


def _fits(problem: Problem, rank: int, order: list[int]) -> bool:
    limit = problem.limits[rank] * (1.0 + ROUNDING)
    if limit == math.inf:
        return True
    table, cells, microbatches = problem.table, problem.cells, problem.microbatches
    held = 0.0
    for number in order:
        if number < 2 * cells:
            held += table.change[number]
            if held > limit:
                return False
        else:
            held -= problem.hold_weight[(number - 2 * cells) // microbatches]
    return True
