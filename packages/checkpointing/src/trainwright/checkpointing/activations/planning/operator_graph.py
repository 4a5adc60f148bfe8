"""The decisions on the operators of a graph, one after the other, as a layered graph of states."""

from __future__ import annotations

from typing import NamedTuple

from trainwright.checkpointing.errors import PlanError

from .costs import OperatorCost, OperatorCosts

# Operators are decided on from the last to the first. A state is the set of operators, still to
# be decided on, whose results a recomputation reads although no backward does; as bits.

_MAX_STATES = 200_000


class Step(NamedTuple):
    """One decision in one state.

    ``target`` is the position of the state after it; ``action`` and ``store`` as in
    `OperatorDecision`.
    """

    target: int
    num_bytes: int
    time_s: float
    action: str
    store: str


class DecisionGraph:
    """All decisions that plans consist of.

    ``levels[k][state]`` holds the steps that decide on the operator ``order[k]``; the states of a
    level are numbered from 0, and level 0 has one.

    Args:
        costs: Of the operators.
        stores: Names of the choices that may be used.

    Raises:
        PlanError: The graph has too many states.
    """

    def __init__(self, costs: OperatorCosts, stores: frozenset[str]) -> None:
        self._choices = [choice for choice in costs.choices if choice.name in stores]
        number = {operator.name: k for k, operator in enumerate(costs.operators)}
        needed = {operator.name for operator in costs.operators if operator.needed}
        self.order = range(len(costs.operators) - 1, -1, -1)
        self.levels: list[list[list[Step]]] = []
        states, total = [0], 0
        for position in self.order:
            operator = costs.operators[position]
            reads = sum(1 << number[name] for name in set(operator.inputs) - needed)
            positions: dict[int, int] = {}
            level = [self._steps(operator, state, position, reads, positions) for state in states]
            self.levels.append(level)
            states = list(positions)
            total += len(states)
            if total > _MAX_STATES:
                raise PlanError(
                    f"the graph of {len(costs.operators)} operators has too many results that are "
                    "read much later than they are computed; plan it in smaller parts"
                )

    def _steps(
        self,
        operator: OperatorCost,
        state: int,
        position: int,
        reads: int,
        positions: dict[int, int],
    ) -> list[Step]:
        rest = state & ~(1 << position)

        def to(target: int) -> int:
            return positions.setdefault(target, len(positions))

        if not operator.needed and rest == state:
            return [Step(to(rest), 0, 0.0, "drop", "")]
        size, able = operator.output_bytes, operator.floating_bytes
        steps = [Step(to(rest), size, 0.0, "keep", "")]
        for choice in self._choices:
            time_s = float(choice.seconds(choice.moves(size, able)))
            steps.append(Step(to(rest), choice.stays(size, able), time_s, "keep", choice.name))
        if operator.recomputable:
            again_s = float(operator.forward_s)
            steps.append(Step(to(rest | reads), 0, again_s, "recompute", ""))
        return steps


class Relaxed(NamedTuple):
    """The best plan when bytes cost time.

    ``rests[k][state]`` is the least cost of the decisions from level k on.
    """

    time_s: float
    num_bytes: int
    steps: list[Step]
    rests: list[list[float]]


def relax(graph: DecisionGraph, time_weight: float, byte_price: float) -> Relaxed:
    """Return the plan with the least ``time_weight * time + byte_price * bytes``."""
    rests: list[list[float]] = [[0.0] * _width(graph)]
    for level in reversed(graph.levels):
        after = rests[-1]
        rests.append(
            [
                min(
                    time_weight * step.time_s + byte_price * step.num_bytes + after[step.target]
                    for step in steps
                )
                for steps in level
            ]
        )
    rests.reverse()
    steps = _follow(graph, rests, time_weight, byte_price)
    return Relaxed(
        sum(step.time_s for step in steps), sum(step.num_bytes for step in steps), steps, rests
    )


def _follow(
    graph: DecisionGraph, rests: list[list[float]], time_weight: float, byte_price: float
) -> list[Step]:
    state, taken = 0, []
    for k, level in enumerate(graph.levels):
        after = rests[k + 1]
        best = min(
            level[state],
            key=lambda step: (
                time_weight * step.time_s + byte_price * step.num_bytes + after[step.target]
            ),
        )
        taken.append(best)
        state = best.target
    return taken


def _width(graph: DecisionGraph) -> int:
    last = graph.levels[-1] if graph.levels else []
    return 1 + max((step.target for steps in last for step in steps), default=0)
