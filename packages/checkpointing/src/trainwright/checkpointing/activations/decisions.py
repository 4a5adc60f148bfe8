"""Values that a layer decides on once: a recomputation is given them and does not decide again."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from trainwright.checkpointing.errors import ReplayError

from .arguments import Build, take_apart
from .measure import tracker

T = TypeVar("T")

_DECIDING: contextvars.ContextVar[tuple[Decisions, ...]] = contextvars.ContextVar(
    "trainwright_decisions", default=()
)


def decide_once(decide: Callable[[], T]) -> T:
    """Return ``decide()``, or in a recomputation what it returned in the forward.

    For what must not come out otherwise the second time: which experts a router chose, sizes of
    what is exchanged, samples. Outside of recomputed layers it is a plain call. The result is kept
    from the forward to the backward, its tensors as they are, so they are not to be changed in
    place. Calls are told apart by their order.

    Args:
        decide: A function without arguments. The tensors that it returns must not need a gradient;
            they may be in dictionaries, lists, tuples and dataclasses.

    Raises:
        ReplayError: A tensor returned needs a gradient; or the recomputation asks for more than the
            forward decided.
    """
    deciding = _DECIDING.get()
    if not deciding:
        return decide()
    replayed = next((each for each in deciding if each.is_replaying), None)
    value: T = decide() if replayed is None else replayed.next()
    for each in deciding:
        if not each.is_replaying:
            each.add(value)
    return value


class Decisions:
    """What one forward of a recomputed function decided."""

    def __init__(self) -> None:
        self.is_replaying = False
        self._made: list[tuple[list[torch.Tensor], Build, list[int]]] = []
        self._position = 0
        self._tracker = tracker()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the decisions made within the block, also for what is recomputed around it."""
        token = _DECIDING.set((*_DECIDING.get(), self))
        try:
            yield
        finally:
            _DECIDING.reset(token)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Give the decisions that were noted, in their order."""
        self.is_replaying = True
        self._position = 0
        token = _DECIDING.set((self,))
        try:
            yield
        finally:
            _DECIDING.reset(token)

    def add(self, value: Any) -> None:
        """Note the next decision."""
        tensors: list[torch.Tensor] = []
        build = take_apart(value, tensors)
        if any(tensor.requires_grad for tensor in tensors):
            raise ReplayError(
                "decide_once returned a tensor that needs a gradient, which would be lost in the "
                "recomputation; decide on indices or detached values, and compute with them outside"
            )
        if self._tracker is not None:
            self._tracker.note(*tensors)
        self._made.append((tensors, build, [tensor._version for tensor in tensors]))

    def next(self) -> Any:
        """Return the next decision that was noted."""
        if self._position == len(self._made):
            raise ReplayError(
                f"the recomputation asks for decision {self._position + 1}, but the forward made "
                f"{len(self._made)}; the layer must take the same way both times"
            )
        tensors, build, versions = self._made[self._position]
        self._position += 1
        if versions != [tensor._version for tensor in tensors]:
            raise ReplayError(
                "a tensor that decide_once returned was changed in place after it, so the "
                "recomputation would see another; change a copy"
            )
        return build(tensors)
