"""What is searched: stages on ranks, what their actions cost and hold, and what is measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from trainwright.pipeline_schedules.actions import FORWARD_KINDS, Kind
from trainwright.pipeline_schedules.costs import Costs
from trainwright.pipeline_schedules.errors import ScheduleError
from trainwright.pipeline_schedules.memory import Memory, per_stage
from trainwright.pipeline_schedules.schedule import Schedule

Objective = Literal["makespan", "span"]
"""From the first start to the last end of all ranks, or the longest of those of one rank."""

Orders = list[list[int]]
"""For each rank its operations in order, as numbers; see `Problem`."""


@attrs.frozen(eq=False)
class Table:
    """What there is to know about each F and I, by its number, in flat lists.

    Attributes:
        needs: The number of what it waits for, -1 for nothing.
        delay: How long that takes to arrive.
        cost: How long it runs.
        change: What it adds to the memory of its rank.
    """

    needs: list[int]
    delay: list[float]
    cost: list[float]
    change: list[float]


@attrs.frozen(eq=False, slots=False)
class Problem:
    """A search as plain numbers, for loops that run a million times.

    An operation is one number: ``cell`` for F, ``cells + cell`` for I and ``2 * cells + cell``
    for W, where the cell of stage s and microbatch i is ``s * microbatches + i``. Microbatches are
    alike, so that every stage may take them in order without loss where a rank has one stage.

    Attributes:
        owner: The rank of each stage.
        microbatches: Microbatches of a step.
        costs: For F, I and W the cost on each stage.
        hops: Latency between each stage and the next; 0 on the same rank.
        hold_forward: Memory held from F to I, by stage.
        hold_weight: Memory held from I to W, by stage.
        limits: The most each rank may hold.
        objective: What is measured.
        whole: Backwards are whole: I stands for B, and W costs and holds nothing.
    """

    owner: tuple[int, ...]
    microbatches: int
    costs: tuple[list[float], list[float], list[float]]
    hops: list[float]
    hold_forward: list[float]
    hold_weight: list[float]
    limits: list[float]
    objective: Objective
    whole: bool = False

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.owner) + 1

    @property
    def cells(self) -> int:
        """Stages times microbatches."""
        return len(self.owner) * self.microbatches

    @property
    def size(self) -> int:
        """Operations of all ranks."""
        return (2 if self.whole else 3) * self.cells

    @functools.cached_property
    def table(self) -> Table:
        """The facts of each F and I."""
        stages, number = len(self.owner), self.microbatches
        cells = self.cells
        before = [-1] * number + list(range(cells - number))
        behind = [*range(cells + number, 2 * cells), *range(cells - number, cells)]
        delays = [0.0, *self.hops, *self.hops, 0.0]
        changes = [w - f for f, w in zip(self.hold_forward, self.hold_weight, strict=True)]
        assert len(delays) == 2 * stages
        return Table(
            before + behind,
            _each(delays, number),
            _each([*self.costs[0], *self.costs[1]], number),
            _each([*self.hold_forward, *changes], number),
        )

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage, owner in enumerate(self.owner) if owner == rank]

    def work(self) -> list[float]:
        """For each rank the time it computes."""
        work = [0.0] * self.ranks
        for stage, rank in enumerate(self.owner):
            work[rank] += self.microbatches * sum(costs[stage] for costs in self.costs)
        return work

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """The schedule of these orders."""
        kinds = np.array([Kind.F, Kind.B if self.whole else Kind.I, Kind.W], dtype=np.int32)
        actions = []
        for order in orders:
            numbers = np.array(order, dtype=np.int64)
            kind, cell = np.divmod(numbers, self.cells)
            stage, microbatch = np.divmod(cell, self.microbatches)
            actions.append(np.stack([kinds[kind], stage, microbatch], axis=1).astype(np.int32))
        return Schedule(actions, self.owner, self.microbatches, name)

    def backbone(self, schedule: Schedule) -> Orders:
        """The F and I of a schedule in order, without its W; a whole backward counts as I."""
        offset_of_kind = np.full(max(Kind) + 1, -1, dtype=np.int64)
        offset_of_kind[list(FORWARD_KINDS)] = 0
        offset_of_kind[[Kind.B, Kind.I]] = self.cells
        orders = []
        for rows in schedule.actions:
            offsets = offset_of_kind[rows[:, 0]]
            numbers = offsets + rows[:, 1].astype(np.int64) * self.microbatches + rows[:, 2]
            orders.append(numbers[offsets >= 0].tolist())
        return orders


def problem_of(
    owner: Sequence[int],
    microbatches: int,
    costs: Costs,
    memory: Memory,
    limit: float | Sequence[float] | None,
    objective: Objective,
) -> Problem:
    """Check the arguments of a search and turn them into numbers.

    Raises:
        ScheduleError: They do not fit each other.
    """
    # A schedule without actions checks placement and size as every schedule does.
    ranks = max(owner, default=-1) + 1
    empty = Schedule([[]] * max(ranks, 1), owner, microbatches)
    idle = sorted(set(range(ranks)) - set(empty.rank_of_stage))
    if idle:
        raise ScheduleError(
            f"rank_of_stage gives no stage to rank {idle[0]}, though to {ranks - 1}"
        )
    stages = empty.num_stages
    table = costs.table(stages)
    if not table[[Kind.F, Kind.I, Kind.W, Kind.B]].any():
        raise ScheduleError(f"some action must cost time, got {costs}")
    if objective not in ("makespan", "span"):
        raise ScheduleError(f"objective must be 'makespan' or 'span', got {objective!r}")
    hops = costs.transfers(stages) * (np.diff(empty.rank_of_stage) != 0)
    return Problem(
        empty.rank_of_stage,
        empty.num_microbatches,
        (table[Kind.F].tolist(), table[Kind.I].tolist(), table[Kind.W].tolist()),
        hops.tolist(),
        per_stage("forward_to_input", memory.forward_to_input, stages).tolist(),
        per_stage("input_to_weight", memory.input_to_weight, stages).tolist(),
        _limits(limit, ranks),
        objective,
    )


def with_whole_backwards(problem: Problem, costs: Costs) -> Problem:
    """The same problem with B in the place of I and W."""
    stages = len(problem.owner)
    backward = costs.table(stages)[Kind.B].tolist()
    return attrs.evolve(
        problem,
        costs=(problem.costs[0], backward, [0.0] * stages),
        hold_weight=[0.0] * stages,
        whole=True,
    )


def relaxed(problem: Problem, costs: Costs) -> Problem:
    """A problem that is nowhere harder, whatever of the backwards is whole or overlapped.

    A whole backward is as an I and a W that costs the rest of it. A pair is as a backward that
    costs no more than the shortest pair, and a forward that costs the rest of its own.
    """
    stages = len(problem.owner)
    forward, backward, weight = problem.costs
    whole = costs.table(stages)[Kind.B].tolist()
    together = zip(backward, weight, whole, strict=True)
    totals = [min(one + other, both) for one, other, both in together]
    pairs = costs.pairs(stages)
    if pairs is not None:
        shortest = float(pairs.min())
        totals = [min(total, shortest) for total in totals]
        alone = zip(forward, pairs.tolist(), strict=True)
        forward = [min(one, max(pair - max(totals), 0.0)) for one, pair in alone]
    inputs = [min(one, total) for one, total in zip(backward, totals, strict=True)]
    weights = [total - one for total, one in zip(totals, inputs, strict=True)]
    return attrs.evolve(problem, costs=(forward, inputs, weights))


def _each(values: Sequence[float], times: int) -> list[float]:
    return [value for value in values for _ in range(times)]


def _limits(limit: float | Sequence[float] | None, ranks: int) -> list[float]:
    values = np.asarray(np.inf if limit is None else limit, dtype=np.float64)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != ranks):
        raise ScheduleError(
            f"memory_limit must be one number or one for each of {ranks} ranks, "
            f"got {list(values.shape)}"
        )
    if np.isnan(values).any():
        raise ScheduleError(f"memory_limit must be numbers, got {limit}")
    rounded: list[float] = np.broadcast_to(values, (ranks,)).tolist()
    return rounded
