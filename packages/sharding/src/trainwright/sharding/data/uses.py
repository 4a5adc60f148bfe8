"""How often each unit is in use at the moment, and its release when it is not any more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.sharding.data.order import GatherOrder
from trainwright.sharding.data.passes import DrivenUnit


class Uses:
    """Counts the forwards and backwards that need each unit.

    Args:
        units: What is used.
        order: Gathers them, and knows what stays on all ranks although nobody uses it.
    """

    def __init__(self, units: Sequence[DrivenUnit], order: GatherOrder) -> None:
        self._units = units
        self._order = order
        self._count = [0] * len(units)
        self._held: set[int] = set()
        self._retained: set[int] = set()

    def take(self, index: int) -> None:
        """Let a unit be there until a `drop`, and look ahead."""
        self._count[index] += 1
        with torch.no_grad():
            self._order.want(index)
            self._order.look_ahead()

    def drop(self, index: int) -> None:
        """End one use."""
        self._count[index] -= 1
        self._release_unused(index)

    def hold(self, index: int) -> None:
        """Let a unit that was run again stay until `let_go`."""
        if index not in self._held:
            self._held.add(index)
            self._count[index] += 1

    def let_go(self, index: int) -> None:
        """End what `hold` began, if it did."""
        if index in self._held:
            self._held.remove(index)
            self.drop(index)

    def let_all_go(self) -> None:
        """End all that `hold` began."""
        for index in sorted(self._held):
            self.let_go(index)

    def retain(self, index: int) -> None:
        """Let a unit stay until `release_all`."""
        if index not in self._retained:
            self._retained.add(index)
            self._count[index] += 1

    def drop_kept(self) -> None:
        """Release what passes kept, on all ranks."""
        for index in self._order.drop_kept():
            self._release_unused(index)

    def release_all(self) -> None:
        """Release everything, used or not."""
        self._count = [0] * len(self._units)
        self._held.clear()
        self._retained.clear()
        self._order.drop_kept()
        for unit in self._units:
            unit.release()

    def _release_unused(self, index: int) -> None:
        if self._count[index] == 0 and not self._order.stays(index):
            self._order.free(index)
