"""Plans as data: what each layer or operator leaves for the backward, and what that claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from trainwright.checkpointing.errors import PlanError

from .checks import identifier, non_negative, positive, text, whole


@attrs.frozen
class Claims:
    """What a planner promises; `simulate` must find the same.

    Args:
        time_s: Forward, backward, recomputation and choices of all layers; for operators, the time
            beyond that of keeping all.
        lower_bound_s: No plan within the budget takes less.
        peak_bytes: Most bytes at any time; for operators, what is held when the forward ends.
        budget_bytes: What was asked for.
        unit_bytes: Bytes were rounded up to multiples of this; 1 if they were not rounded.
    """

    time_s: float = attrs.field(validator=non_negative)
    lower_bound_s: float = attrs.field(validator=non_negative)
    peak_bytes: int = attrs.field(validator=whole)
    budget_bytes: int = attrs.field(validator=whole)
    unit_bytes: float = attrs.field(default=1.0, validator=positive)

    @property
    def gap_s(self) -> float:
        """Time by which a better plan could win at most: 0 proves that there is none."""
        gap = self.time_s - self.lower_bound_s
        return gap if gap > 1e-9 * self.time_s else 0.0

    @property
    def spare_bytes(self) -> int:
        """Bytes of the budget that are not used."""
        return self.budget_bytes - self.peak_bytes


def as_items(items: Iterable[Kept | Region]) -> tuple[Kept | Region, ...]:
    """Return the items as a tuple."""
    return tuple(items)


def as_decisions(decisions: Iterable[OperatorDecision]) -> tuple[OperatorDecision, ...]:
    """Return the decisions as a tuple."""
    return tuple(decisions)


@attrs.frozen
class Kept:
    """A layer of which the backward's needs are saved when it runs.

    Args:
        layer: Its number in the chain, from 0.
        store: "" where they stay as they are, else the name of a choice.
    """

    layer: int = attrs.field(validator=whole)
    store: str = attrs.field(default="")

    @store.validator
    def _check_store(self, attribute: attrs.Attribute[str], value: str) -> None:
        if value != "":
            identifier(self, attribute, value)


@attrs.frozen
class Region:
    """Layers of which only the input is saved; the backward runs them again as ``items`` say.

    Args:
        items: What is kept and what is recomputed once more when the region is recomputed.
        store: What becomes of the region's input: "" it stays, else the name of a choice.
    """

    items: tuple[Kept | Region, ...] = attrs.field(converter=as_items)
    store: str = attrs.field(default="")

    @items.validator
    def _check_items(self, attribute: object, value: tuple[Kept | Region, ...]) -> None:
        if not value:
            raise PlanError("a region needs at least one layer, got none")
        for item in value:
            if item.store:
                raise PlanError(
                    f"{item!r} is within a region, where everything stays as it is; "
                    f"store {item.store!r} can be given at the outermost level only"
                )

    @store.validator
    def _check_store(self, attribute: attrs.Attribute[str], value: str) -> None:
        if value != "":
            identifier(self, attribute, value)


Item = Kept | Region


def layers_of(items: tuple[Item, ...]) -> Iterator[int]:
    """Yield the numbers of the layers in the order in which they run."""
    for item in items:
        if isinstance(item, Kept):
            yield item.layer
        else:
            yield from layers_of(item.items)


@attrs.frozen
class ChainPlan:
    """What a chain of layers saves: the layers in order, some within nested regions.

    Two plans are equal if their items are. `str` gives a short notation, in which parentheses are
    regions and ``@`` names a choice: ``0 1@cpu (2 (3 4) 5)@int8 6``.

    Args:
        items: All layers from 0 on, each once, in order.
        claims: What the planner promises, None for a plan made by hand.

    Raises:
        PlanError: A layer is missing, out of order, or given twice.
    """

    items: tuple[Item, ...] = attrs.field(converter=as_items)
    claims: Claims | None = attrs.field(default=None, eq=False, kw_only=True)

    @items.validator
    def _check_items(self, attribute: object, value: tuple[Item, ...]) -> None:
        found = list(layers_of(value))
        if found != list(range(len(found))) or not found:
            raise PlanError(
                f"a plan must hold the layers 0, 1, 2, ... each once and in order, got {found}"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the chain."""
        return sum(1 for _ in layers_of(self.items))

    @property
    def stores(self) -> frozenset[str]:
        """Names of the choices that the plan makes use of."""
        return frozenset(item.store for item in self.items if item.store)

    def __str__(self) -> str:
        return " ".join(map(_notation, self.items))


@attrs.frozen
class OperatorDecision:
    """What becomes of the result of one operator.

    Args:
        name: The operator.
        action: "keep"; "recompute": it runs once more in the backward; "drop": nobody needs it.
        store: For kept ones, "" or the name of a choice.
    """

    name: str = attrs.field(validator=text)
    action: str = attrs.field(validator=attrs.validators.in_(("keep", "recompute", "drop")))
    store: str = attrs.field(default="", validator=text)


@attrs.frozen
class OperatorPlan:
    """What the operators of a graph keep for the backward, in the order of the graph.

    Two plans are equal if their decisions are. `str` gives ``name`` for kept ones, ``name@cpu``
    for those with a choice, and ``(name)`` for recomputed ones; dropped ones are left out.

    Args:
        decisions: One for each operator.
        claims: What the planner promises, None for a plan made by hand.
    """

    decisions: tuple[OperatorDecision, ...] = attrs.field(converter=as_decisions)
    claims: Claims | None = attrs.field(default=None, eq=False, kw_only=True)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the operators that run twice."""
        return tuple(each.name for each in self.decisions if each.action == "recompute")

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the operators whose results are kept, in whatever way."""
        return tuple(each.name for each in self.decisions if each.action == "keep")

    def __str__(self) -> str:
        shown = [each for each in self.decisions if each.action != "drop"]
        return " ".join(
            f"({each.name})" if each.action == "recompute" else each.name + _at(each.store)
            for each in shown
        )


Plan = ChainPlan | OperatorPlan


def _notation(item: Item) -> str:
    if isinstance(item, Kept):
        return f"{item.layer}{_at(item.store)}"
    return f"({' '.join(map(_notation, item.items))}){_at(item.store)}"


def _at(store: str) -> str:
    return f"@{store}" if store else ""
