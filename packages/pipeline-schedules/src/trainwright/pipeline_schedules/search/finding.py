"""The search for a schedule that suits given costs and memory."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trainwright.pipeline_schedules.costs import UNIT_COSTS, Costs
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import UNIT_MEMORY, Memory
from trainwright.pipeline_schedules.schedule import Schedule
from trainwright.pipeline_schedules.search.bounds import lower_bound
from trainwright.pipeline_schedules.search.filling import ROUNDING
from trainwright.pipeline_schedules.search.hunting import Hunt
from trainwright.pipeline_schedules.search.problem import (
    Objective,
    Problem,
    problem_of,
    relaxed,
    with_whole_backwards,
)


@attrs.frozen
class Found:
    """What a search found.

    Attributes:
        schedule: The best schedule, within the memory limit.
        value: Its makespan, or its span.
        bound: What no schedule can undercut.
        objective: Which of the two ``value`` and ``bound`` are.
    """

    schedule: Schedule
    value: float
    bound: float
    objective: Objective

    @property
    def gap(self) -> float:
        """How far the value is above the bound at most, relative to the bound."""
        return self.value / self.bound - 1.0


def v_shape(ranks: int) -> tuple[int, ...]:
    """The placement of ZB-V: rank r holds stages r and ``2 * ranks - 1 - r``."""
    return (*range(ranks), *reversed(range(ranks)))


def search(
    rank_of_stage: Sequence[int],
    microbatches: int,
    costs: Costs = UNIT_COSTS,
    *,
    memory: Memory = UNIT_MEMORY,
    memory_limit: float | Sequence[float] | None = None,
    objective: Objective = "makespan",
    budget: int = 3_000_000,
) -> Found:
    """Find a schedule for these stages, costs and memory; at least as good as any generator's.

    Orders of F and I are drawn up in several ways (numbers of microbatches ahead that fall in
    equal steps, ranks that choose as time goes by, those of the generators); weight gradients go
    where they do no harm; then single actions move along what makes the schedule late. Backwards
    stay whole where that is cheaper. The same arguments give the same schedule.

    Args:
        rank_of_stage: The rank of each stage, such as ``range(8)`` or ``v_shape(4)``.
        microbatches: Microbatches of a step.
        costs: What F, I, W, B and transfers cost; pairs only count where a generator has them.
        memory: What each stage holds for a microbatch.
        memory_limit: The most a rank may hold, one number or one a rank; None for no limit.
        objective: ``"makespan"``, what a step costs that ends with all ranks together, or
            ``"span"``, the longest of any rank, what it costs when steps follow each other.
        budget: How many actions may be placed in all; about three microseconds each.

    Raises:
        ScheduleError: Arguments that do not fit each other, or no schedule within the limit: a
            rank must hold at least one microbatch of all its stages.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 3 and
    appendix, for the tolerance with which waits are filled.
    """
    problem = problem_of(rank_of_stage, microbatches, costs, memory, memory_limit, objective)
    whole = with_whole_backwards(problem, costs)
    hunt = Hunt(costs, memory, budget)
    hunt.take_generators(problem)
    bound = lower_bound(relaxed(problem, costs))
    hunt.enough = bound * (1 + ROUNDING)
    hunt.over(problem)
    if hunt.best is None or _saves(problem, whole):
        hunt.budget = max(hunt.budget, budget // 2)
        hunt.over(whole)
    if hunt.best is None:
        raise ScheduleError(
            "no schedule holds no more than the memory limit: a rank must hold at least one "
            f"microbatch of all its stages, got memory_limit={memory_limit} with {memory}"
        )
    assert bound <= hunt.value * (1 + ROUNDING), "only rounding puts a value below the bound"
    return Found(hunt.best, hunt.value, min(bound, hunt.value), objective)


def _saves(problem: Problem, whole: Problem) -> bool:
    """Whether some B is cheaper than its I and W."""
    together = zip(problem.costs[1], problem.costs[2], whole.costs[1], strict=True)
    return any(two < (one + other) * (1 - ROUNDING) for one, other, two in together)
