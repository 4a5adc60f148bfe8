"""Executes plans of operators symbolically: backwards ask for results, in the graph's order."""

from __future__ import annotations

import attrs

from trainwright.checkpointing.errors import PlanError

from .costs import OperatorCosts
from .plan import OperatorDecision, OperatorPlan


@attrs.frozen
class OperatorSimulation:
    """What a plan of operators does.

    Args:
        time_s: Time beyond that of keeping all: recomputation and choices.
        held_bytes: Bytes kept when the forward has ended, which is what budgets are about.
        peak_bytes: Most bytes in the backward if nothing restored is freed before its end, as
            where all of a module is recomputed at once.
        recomputed: Operators that ran again, in the order in which they did.
    """

    time_s: float
    held_bytes: int
    peak_bytes: int
    recomputed: tuple[str, ...]


def simulate_operators(plan: OperatorPlan, costs: OperatorCosts) -> OperatorSimulation:
    """Return what ``plan`` does to the graph of these costs.

    Raises:
        PlanError: The plan is of other operators, names a choice that is not offered, leaves out
            what the backward reads, or recomputes what cannot be repeated or nobody reads.
    """
    names = [operator.name for operator in costs.operators]
    if [each.name for each in plan.decisions] != names:
        raise PlanError(
            f"the plan decides on {[each.name for each in plan.decisions]}, "
            f"the costs are of {names}"
        )
    machine = _Machine(costs, plan)
    for operator in reversed(costs.operators):
        if operator.needed:
            machine.fetch(operator.name, "the backward")
    machine.check_all_recomputed()
    return OperatorSimulation(
        machine.time_s,
        machine.held_bytes,
        machine.held_bytes + machine.restored_bytes,
        tuple(machine.recomputed),
    )


class _Machine:
    """Which results are there, and what it took."""

    def __init__(self, costs: OperatorCosts, plan: OperatorPlan) -> None:
        self._operators = {operator.name: operator for operator in costs.operators}
        self._choices = {choice.name: choice for choice in costs.choices}
        self._decisions = {each.name: each for each in plan.decisions}
        self._there: set[str] = set()
        self.time_s = 0.0
        self.held_bytes = self.restored_bytes = 0
        self.recomputed: list[str] = []
        for each in plan.decisions:
            if each.action == "keep":
                self._keep(each)
        used = {each.store for each in plan.decisions if each.action == "keep" and each.store}
        self.held_bytes += sum(self._choices[name].staging_bytes for name in sorted(used))

    def fetch(self, name: str, reader: str) -> None:
        """Make a result available, with all that it takes to compute it again."""
        waiting = [(name, reader)]
        while waiting:
            current, asking = waiting[-1]
            if current in self._there:
                waiting.pop()
                continue
            operator = self._operators[current]
            missing = [each for each in operator.inputs if each not in self._there]
            self._check(self._decisions[current], asking)
            if missing:
                waiting += [(each, current) for each in missing]
                continue
            waiting.pop()
            self._there.add(current)
            self.recomputed.append(current)
            self.time_s += operator.forward_s
            self.restored_bytes += operator.output_bytes

    def check_all_recomputed(self) -> None:
        """Refuse a plan that says more is recomputed than is."""
        said = {name for name, each in self._decisions.items() if each.action == "recompute"}
        if idle := sorted(said - set(self.recomputed)):
            raise PlanError(f"the plan recomputes {idle}, which nobody reads; drop them")

    def _keep(self, decision: OperatorDecision) -> None:
        operator = self._operators[decision.name]
        self._there.add(decision.name)
        if not decision.store:
            self.held_bytes += operator.output_bytes
            return
        if decision.store not in self._choices:
            raise PlanError(
                f"the costs offer no {decision.store!r} for operator {decision.name!r}; "
                f"they offer {list(self._choices)}"
            )
        choice = self._choices[decision.store]
        sizes = operator.output_bytes, operator.floating_bytes
        self.time_s += choice.seconds(choice.moves(*sizes))
        self.held_bytes += choice.stays(*sizes)
        self.restored_bytes += operator.output_bytes

    def _check(self, decision: OperatorDecision, reader: str) -> None:
        name = decision.name
        if decision.action != "recompute":
            raise PlanError(f"operator {name!r} is dropped, but {reader} reads its result")
        if not self._operators[name].recomputable:
            raise PlanError(
                f"operator {name!r} cannot be recomputed, since it would not repeat its forward; "
                "keep its result"
            )
