"""The planner of chains: the fastest nested plan within a budget, and a proof of how fast."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import attrs

from trainwright.checkpointing.errors import InfeasibleBudgetError, PlanError

from . import checks
from .chain_least import LeastMemory
from .chain_moves import Moves
from .chain_tables import InnerTable, OuterTable
from .chain_trace import ByMemory, ByTime, read_plan
from .costs import ChainCosts
from .grid import cut
from .plan import ChainPlan, Claims
from .simulate import simulate_chain


def plan_chain(costs: ChainCosts, budget_bytes: int, *, steps: int = 500) -> ChainPlan:
    """Return the fastest plan of a chain whose peak stays within a budget.

    Plans are nested: a region is recomputed from its input, and may keep, or recompute once more,
    parts of itself. At the outermost level what is saved may also be handed to one of the offered
    choices. Bytes are rounded up to 1 / ``steps`` of the budget unless all sizes are multiples of
    a unit of at least that size; the lower bound is the optimum with bytes rounded down, so
    ``claims.gap_s`` is what rounding can have cost, and 0 is a proof of optimality. Layers are
    kept wherever that takes no more time than recomputing.

    Args:
        costs: Of the layers.
        budget_bytes: For the peak of saved bytes and temporaries, the chain's input included.
        steps: Memory sizes that are told apart, at least 1.

    Raises:
        InfeasibleBudgetError: No plan stays within the budget; the smallest that can is named.
        PlanError: ``budget_bytes`` or ``steps`` is out of range.

    Source: Beaumont et al. 2019, "Optimal checkpointing for heterogeneous chains: how to train
    deep neural networks with limited memory", persistent schedules.
    """
    checks.budget(budget_bytes)
    if type(steps) is not int or steps < 1:
        raise PlanError(f"steps must be a whole number, at least 1, got {steps!r}")
    offers = [_Offer(costs, names) for names in _store_sets(costs)]
    least = min(offer.least_bytes for offer in offers)
    if least > budget_bytes:
        raise InfeasibleBudgetError(
            f"no plan of {len(costs.layers)} layers stays within {budget_bytes} bytes; "
            f"the smallest budget that can be met is {least} bytes",
            least,
        )
    search = _Search(costs, budget_bytes, steps)
    for offer in offers:
        search.consider(offer)
    return search.result()


class _Offer:
    """A set of choices that a plan may use, and what is set aside for them."""

    def __init__(self, costs: ChainCosts, stores: frozenset[str]) -> None:
        self.stores = stores
        self.staging_bytes = sum(c.staging_bytes for c in costs.choices if c.name in stores)
        self.moves = Moves(costs, _bytes, stores)
        self.least = LeastMemory(self.moves)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that can be met."""
        return self.staging_bytes + self.least.bytes


class _Search:
    """The best plan and the best bound so far."""

    def __init__(self, costs: ChainCosts, budget_bytes: int, steps: int) -> None:
        self._costs = costs
        self._budget = budget_bytes
        self._grid = cut(budget_bytes, steps, _sizes(costs))
        self._above = InnerTable(Moves(costs, self._grid.up, frozenset()), self._grid.top)
        self._below = self._above
        if not self._grid.exact:
            below = Moves(costs, self._grid.down, frozenset())
            self._below = InnerTable(below, self._grid.top)
        self._best: ChainPlan | None = None
        self._bounds: list[float] = []

    def consider(self, offer: _Offer) -> None:
        """Take the plans of one offer into account."""
        costs, grid = self._costs, self._grid
        if offer.least_bytes <= self._budget:
            memory = self._budget - offer.staging_bytes
            self._take(read_plan(offer.moves, ByMemory(offer.least), memory))
        below = Moves(costs, grid.down, offer.stores)
        top = grid.top - grid.down(offer.staging_bytes)
        if top < 0:
            return
        outer = OuterTable(below, self._below, grid.top)
        self._bounds.append(outer.time_s(top))
        if self._try(below, self._below, outer, top) or grid.exact:
            return
        above = Moves(costs, grid.up, offer.stores)
        outer_above = OuterTable(above, self._above, grid.top)
        top_above = grid.top - grid.up(offer.staging_bytes)
        if top_above >= 0:
            self._try(above, self._above, outer_above, top_above)
        # With bytes rounded down plans are too large, but less so for a smaller budget: by at most
        # a unit for each thing that is held. Look for the largest budget whose plan fits.
        fails, fits = 0, min(top, 2 * len(costs.layers))
        while fits - fails > 1:
            middle = (fails + fits) // 2
            if self._try(below, self._below, outer, top - middle):
                fits = middle
            else:
                fails = middle

    def result(self) -> ChainPlan:
        """Return the best plan with its claims."""
        assert self._best is not None
        assert self._best.claims is not None
        bound = min(self._bounds)
        claims = attrs.evolve(self._best.claims, lower_bound_s=min(bound, self._best.claims.time_s))
        return attrs.evolve(self._best, claims=claims)

    def _try(self, moves: Moves, inner: InnerTable, outer: OuterTable, memory: int) -> bool:
        """Take the plan of these tables; say whether it stays within the budget."""
        if outer.time_s(memory) == float("inf"):
            return False
        return self._take(read_plan(moves, ByTime(inner, outer), memory))

    def _take(self, items: tuple[object, ...]) -> bool:
        plan = ChainPlan(items)  # type: ignore[arg-type]
        found = simulate_chain(plan, self._costs)
        if found.peak_bytes > self._budget:
            return False
        claims = Claims(found.time_s, 0.0, found.peak_bytes, self._budget, self._grid.unit_bytes)
        best = self._best
        if best is None or best.claims is None or found.time_s < best.claims.time_s:
            self._best = ChainPlan(plan.items, claims=claims)
        return True


def _store_sets(costs: ChainCosts) -> Iterator[frozenset[str]]:
    """Yield the sets of choices to weigh: with and without each one that needs staging."""
    partials = {partial.name for layer in costs.layers for partial in layer.partials}
    free = {choice.name for choice in costs.choices if not choice.staging_bytes} | partials
    staged = [choice.name for choice in costs.choices if choice.staging_bytes]
    for count in range(len(staged) + 1):
        for names in combinations(staged, count):
            yield frozenset(free.union(names))


def _sizes(costs: ChainCosts) -> Iterator[int]:
    """Yield every size that a table adds up."""
    yield costs.input_bytes
    for number, layer in enumerate(costs.layers):
        source = costs.input_bytes_of(number)
        yield from (layer.output_bytes, layer.saved_bytes)
        yield from (layer.forward_temporary_bytes, layer.backward_temporary_bytes)
        yield from (partial.saved_bytes for partial in layer.partials)
        for choice in costs.choices:
            yield choice.stays(source, source)
            everything = source + layer.saved_bytes
            yield choice.stays(everything, source + layer.floating_bytes)
    yield from (choice.staging_bytes for choice in costs.choices)


def _bytes(num_bytes: int) -> int:
    return num_bytes
