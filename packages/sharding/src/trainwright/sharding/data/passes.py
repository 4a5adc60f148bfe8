"""Which passes of a step gather units, and what a pass gathers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import attrs
from torch import nn


class DrivenUnit(Protocol):
    """Weights that are gathered and released together, such as a `Unit`.

    ``gather`` starts and does nothing where the weights are here or on their way;
    ``await_weights`` waits; ``release`` waits for what is on its way before it frees. The memory
    keeps its identity, so that what autograd saved of a weight is right after the next gather.
    """

    @property
    def name(self) -> str:
        """The module's name, for messages."""
        ...

    @property
    def module(self) -> nn.Module:
        """What computes with the weights."""
        ...

    @property
    def is_gathered(self) -> bool:
        """Whether the weights are here and were waited for."""
        ...

    def gather(self) -> None:
        """Start collecting the weights."""
        ...

    def await_weights(self) -> None:
        """Wait until the weights are here."""
        ...

    def release(self) -> None:
        """Free the weights."""
        ...

    def end_backward(self) -> None:
        """Learn that the running backward does not compute with the weights any more."""
        ...


class Pass(enum.IntEnum):
    """The kinds of passes, each with an order of its own."""

    FORWARD = 0
    INFERENCE = 1
    BACKWARD = 2
    SECOND_BACKWARD = 3

    @property
    def is_backward(self) -> bool:
        """Whether units run from the last to the first."""
        return self in (Pass.BACKWARD, Pass.SECOND_BACKWARD)

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = {
    Pass.FORWARD: "forward with gradients",
    Pass.INFERENCE: "forward without gradients",
    Pass.BACKWARD: "backward",
    Pass.SECOND_BACKWARD: "second backward through the same forward",
}


def parents_of(units: Sequence[DrivenUnit]) -> list[int | None]:
    """Return for each unit the innermost other unit whose module holds its module."""
    owner: dict[int, int] = {}
    parents = []
    for index, unit in enumerate(units):
        parents.append(owner.get(id(unit.module)))
        for module in unit.module.modules():
            owner[id(module)] = index
    return parents


def usual_order(
    kind: Pass, parents: Sequence[int | None], forward: Sequence[int] | None
) -> list[int]:
    """Return all units in the order in which a pass most likely needs them.

    Args:
        kind: Of the pass.
        parents: The unit around each unit.
        forward: The units as a forward was seen to need them; None takes that of registration.
    """
    places = {index: place for place, index in reversed(list(enumerate(forward or ())))}
    children: dict[int | None, list[int]] = {}
    for index, parent in enumerate(parents):
        children.setdefault(parent, []).append(index)
    order: list[int] = []
    stack: list[int | None] = [None]
    while stack:
        unit = stack.pop()
        if unit is not None:
            order.append(unit)
        found = sorted(children.get(unit, ()), key=lambda index: places.get(index, index))
        # What is pushed last comes first: siblings run backwards in a backward.
        stack.extend(found if kind.is_backward else reversed(found))
    return order


def merge_orders(orders: Sequence[Sequence[int]], usual: Sequence[int]) -> tuple[int, ...] | None:
    """Return one sequence that holds each of the orders as a subsequence.

    The nth use of a unit is taken for the same one in each order; what they leave open goes as
    ``usual``. None where they contradict each other.
    """
    rank = {unit: place for place, unit in enumerate(usual)}
    after: dict[tuple[int, int], set[tuple[int, int]]] = {}
    num_before: dict[tuple[int, int], int] = {}
    for order in orders:
        previous = None
        count: dict[int, int] = {}
        for unit in order:
            use = (unit, count.get(unit, 0))
            count[unit] = use[1] + 1
            num_before.setdefault(use, 0)
            if previous is not None and use not in after.setdefault(previous, set()):
                after[previous].add(use)
                num_before[use] += 1
            previous = use
    ready = [use for use, number in num_before.items() if number == 0]
    merged: list[int] = []
    while ready:
        use = min(ready, key=lambda use: (rank[use[0]], use[1]))
        ready.remove(use)
        merged.append(use[0])
        for later in after.get(use, ()):
            num_before[later] -= 1
            if num_before[later] == 0:
                ready.append(later)
    return tuple(merged) if len(merged) == len(num_before) else None


def insert_unused(
    sequence: Sequence[int], usual: Sequence[int], unused: set[int]
) -> tuple[int, ...]:
    """Return the sequence with each unused unit where it usually comes.

    A unit that no rank happened to use while the order was learned may be used later on.
    """
    result = list(sequence)
    place = 0
    for unit in usual:
        if unit in result:
            # Where both begin at one node, an inner unit comes before the one around it.
            place = max(place, result.index(unit) + 1)
        elif unit in unused:
            result.insert(place, unit)
            place += 1
    return tuple(result)


@attrs.define(eq=False)
class Call:
    """One run of a unit's forward.

    Args:
        index: The unit, or None for a root that is none.
        start: What autograd made since belongs to it.
        task: The backward that it is part of: for a forward the one that runs it again, for its
            own backward that which runs it.
        forward: The pass that it was part of.
    """

    index: int | None
    start: int
    task: int
    forward: int | None
