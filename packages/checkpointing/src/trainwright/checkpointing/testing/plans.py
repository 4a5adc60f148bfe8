"""Hypothesis strategies for costs, and every plan that there is, to compare planners with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import attrs
from hypothesis import strategies as st

from trainwright.checkpointing.activations.planning import (
    ChainCosts,
    ChainPlan,
    Choice,
    Compress,
    Item,
    Kept,
    LayerCost,
    Offload,
    OperatorCost,
    OperatorCosts,
    OperatorDecision,
    OperatorPlan,
    Partial,
    Region,
)

SMALL = st.integers(0, 5)


@st.composite
def layer_costs(draw: st.DrawFn, name: str = "layer") -> LayerCost:
    """Draw a layer of whole seconds and a few bytes, in which everything may be zero."""
    output, inner, output_saved = draw(SMALL), draw(st.integers(0, 9)), draw(st.booleans())
    saved = inner + output if output_saved else inner
    partials = []
    if draw(st.integers(0, 3)) == 0:
        partials = [Partial("partial", draw(st.integers(0, saved)), draw(SMALL))]
    return LayerCost(
        name,
        draw(SMALL),
        draw(SMALL),
        output,
        saved,
        output_saved=output_saved,
        input_saved=draw(st.booleans()),
        forward_temporary_bytes=draw(st.sampled_from([0, 0, 3])),
        backward_temporary_bytes=draw(st.sampled_from([0, 0, 4])),
        recomputable=draw(st.integers(0, 5)) > 0,
        compressible_bytes=draw(st.sampled_from([None, saved // 2])),
        partials=partials,
    )


def choice_lists() -> st.SearchStrategy[list[Choice]]:
    """Draw what is offered besides keeping and recomputing."""
    offload = st.builds(
        Offload,
        st.just("cpu"),
        st.sampled_from([2.0, 4.0]),
        st.just(4.0),
        overlap=st.sampled_from([0.0, 0.5]),
        staging_bytes=st.sampled_from([0, 2]),
    )
    compress = st.builds(
        Compress, st.just("half"), st.just(0.5), st.sampled_from([4.0, 8.0]), st.just(8.0)
    )
    return st.tuples(st.lists(offload, max_size=1), st.lists(compress, max_size=1)).map(
        lambda both: [*both[0], *both[1]]
    )


def chain_costs(
    max_layers: int, choices: st.SearchStrategy[list[Choice]] | None = None
) -> st.SearchStrategy[ChainCosts]:
    """Draw a chain."""
    return st.builds(
        ChainCosts,
        st.lists(layer_costs(), min_size=1, max_size=max_layers),
        SMALL,
        st.just([]) if choices is None else choices,
    )


@st.composite
def operator_costs(draw: st.DrawFn, max_operators: int, choices: bool = True) -> OperatorCosts:
    """Draw a graph of operators."""
    operators = []
    for number in range(draw(st.integers(0, max_operators))):
        inputs = [f"o{k}" for k in range(number) if draw(st.booleans())]
        size = draw(st.integers(0, 6))
        operators.append(
            OperatorCost(
                f"o{number}",
                draw(SMALL),
                size,
                inputs,
                needed=draw(st.integers(0, 2)) > 0,
                recomputable=draw(st.integers(0, 4)) > 0,
                compressible_bytes=draw(st.sampled_from([None, size // 2])),
            )
        )
    return OperatorCosts(operators, draw(choice_lists()) if choices else [])


def chain_plans(num_layers: int, stores: Sequence[str] = ()) -> Iterator[ChainPlan]:
    """Yield every plan of a chain: 2, 8, 48, 352, 2880, 25216 without stores.

    Regions that hold nothing but one other region are left out, since they only waste time.
    """
    for items in _items(0, num_layers):
        for chosen in itertools.product(["", *stores], repeat=len(items)):
            pairs = zip(items, chosen, strict=True)
            yield ChainPlan([attrs.evolve(item, store=store) for item, store in pairs])


def operator_plans(costs: OperatorCosts) -> Iterator[OperatorPlan]:
    """Yield every plan of a graph, senseless ones among them."""
    stores = [choice.name for choice in costs.choices]
    options = [("keep", ""), *(("keep", s) for s in stores), ("recompute", ""), ("drop", "")]
    for chosen in itertools.product(options, repeat=len(costs.operators)):
        pairs = zip(costs.operators, chosen, strict=True)
        yield OperatorPlan([OperatorDecision(o.name, *option) for o, option in pairs])


@cache
def _items(first: int, end: int) -> tuple[tuple[Item, ...], ...]:
    proper = _proper(first, end)
    return proper + tuple((Region(items),) for items in proper)


@cache
def _proper(first: int, end: int) -> tuple[tuple[Item, ...], ...]:
    """All but those that are one region."""
    if end - first == 1:
        return ((Kept(first),),)
    found: list[tuple[Item, ...]] = [(Kept(first), *rest) for rest in _items(first + 1, end)]
    for stop in range(first + 1, end):
        for inside in _proper(first, stop):
            found += [(Region(inside), *rest) for rest in _items(stop, end)]
    return tuple(found)
