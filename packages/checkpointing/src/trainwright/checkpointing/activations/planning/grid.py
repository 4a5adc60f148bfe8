"""Whole units of memory: bytes as the tables of the planners count them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs


@attrs.frozen
class Grid:
    """A budget cut into equal units.

    Args:
        top: Units of the whole budget.
        units: With ``bytes``, the size of one unit is ``bytes / units``.
        bytes: See ``units``.
    """

    top: int
    units: int
    bytes: int

    @property
    def unit_bytes(self) -> float:
        """Size of one unit."""
        return self.bytes / self.units

    @property
    def exact(self) -> bool:
        """Whether every size is a whole number of units, so that nothing is rounded."""
        return self.units == 1

    def up(self, num_bytes: int) -> int:
        """Return the units that hold so many bytes."""
        return -(-num_bytes * self.units // self.bytes)

    def down(self, num_bytes: int) -> int:
        """Return the units that so many bytes fill."""
        return num_bytes * self.units // self.bytes


def cut(budget_bytes: int, steps: int, sizes: Iterable[int]) -> Grid:
    """Return ``budget_bytes`` in at most ``steps`` units, exact ones if the sizes allow it."""
    common = math.gcd(*sizes)
    if common == 0:  # nothing takes any memory
        return Grid(0, 1, 1)
    if budget_bytes // common <= steps:
        return Grid(budget_bytes // common, 1, common)
    return Grid(steps, steps, budget_bytes)
