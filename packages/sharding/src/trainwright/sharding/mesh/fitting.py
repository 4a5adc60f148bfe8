"""Which sizes of a mesh would fit a number of ranks, for messages that say the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.axes import DENSE_AXES

if TYPE_CHECKING:
    from trainwright.sharding.mesh.shape import MeshShape


def way_to(shape: MeshShape, world_size: int) -> str:
    """Return which change of a shape makes it fit: of one axis if it can be, else of several."""
    for axis in ("dp", "tp", "pp", "cp"):
        size, rest = divmod(world_size, shape.world_size // shape.size(axis))
        if rest == 0 and _can_have(shape, {axis: size}):
            others = [other for other in DENSE_AXES if other != axis and shape.size(other) > 1]
            kept = f"with this {' and '.join(others)}, " if others else ""
            return f"{kept}{axis} must be {size}"
    near = _nearest(shape, world_size)
    if not _can_have(shape, near):
        return f"no change of one axis fits; the sizes must multiply to {world_size}"
    sizes = ", ".join(f"{axis}={near[axis]}" for axis in DENSE_AXES if near[axis] > 1)
    return f"no change of one axis fits; near it is {sizes or 'dp=1'}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, smallest first."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def listed(values: list[int]) -> str:
    """Return numbers between commas."""
    return ", ".join(str(value) for value in values)


def _nearest(shape: MeshShape, world_size: int) -> dict[str, int]:
    """Return sizes that fit, none but dp's larger than it was; the dearest axis chooses first."""
    sizes: dict[str, int] = {}
    left = world_size
    for axis in ("tp", "cp", "pp"):
        sizes[axis] = max(size for size in divisors(left) if size <= shape.size(axis))
        left //= sizes[axis]
    return {**sizes, "dp": left}


def _can_have(shape: MeshShape, sizes: Mapping[str, Any]) -> bool:
    try:
        attrs.evolve(shape, **sizes)
    except ShardingError:
        return False
    return True
