"""In which order the axes of a mesh run through the ranks: which are neighbours, which far."""

from __future__ import annotations

from collections.abc import Iterable

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.axes import DENSE_AXES, HYBRID_AXES, unknown_axis

_PARTS = ("dp_replicate", "dp_shard")


def read_order(order: str | Iterable[str]) -> tuple[str, ...]:
    """Return the axes of an order, outermost first; text separates them by slashes.

    Raises:
        ShardingError: They are not pp, dp, cp and tp once each, where dp may be dp_replicate and
            dp_shard.
    """
    named = tuple(order.split("/")) if isinstance(order, str) else tuple(order)
    if named == DENSE_AXES:
        return named
    where = f"order {order!r}"
    if isinstance(order, str) and "/" not in order and set(order.split("-")) == set(DENSE_AXES):
        raise ShardingError(
            f"{where} must have its axes outermost first, between slashes; where this names the "
            f"innermost first, write {'/'.join(reversed(order.split('-')))!r}"
        )
    wanted = HYBRID_AXES if set(_PARTS) & set(named) else DENSE_AXES
    for axis in named:
        if axis not in wanted:
            raise ShardingError(f"{where}: {_misplaced(axis, wanted)}")
        if named.count(axis) > 1:
            raise ShardingError(f"{where} names axis {axis} twice; keep one of them")
    missing = [axis for axis in wanted if axis not in named]
    if missing:
        raise ShardingError(
            f"{where} leaves out {', '.join(missing)}; name each of {', '.join(wanted)} once, "
            f"outermost first, also those of size 1: {'/'.join((*missing, *named))!r} would do"
        )
    return named


def split_dp(order: Iterable[str]) -> tuple[str, ...]:
    """Return an order with dp in its two parts, which are neighbours where dp was named."""
    parts: list[str] = []
    for axis in order:
        parts += _PARTS if axis == "dp" else (axis,)
    return tuple(parts)


def join_dp(order: Iterable[str]) -> tuple[str, ...]:
    """Return an order in which neighbouring parts of dp are dp: the inverse of `split_dp`."""
    named = list(order)
    if all(part in named for part in _PARTS):
        at = named.index(_PARTS[0])
        if named[at : at + 2] == list(_PARTS):
            named[at : at + 2] = ["dp"]
    return tuple(named)


def complete_order(large: Iterable[str]) -> tuple[str, ...]:
    """Return an order of all axes in which the axes of more than one rank run as given.

    Args:
        large: Axes of more than one rank, outermost first; dp or its parts.
    """
    named = split_dp(large)
    if named == tuple(axis for axis in HYBRID_AXES if axis in named):
        return DENSE_AXES
    for part, other in (_PARTS, reversed(_PARTS)):
        # A part of size 1 lies beside the other, so that the two can be one dp.
        if part in named and other not in named:
            both = _PARTS
            at = named.index(part)
            named = (*named[:at], *both, *named[at + 1 :])
    absent = tuple(axis for axis in HYBRID_AXES if axis not in named)
    return join_dp((*absent, *named))


def _misplaced(axis: str, wanted: Iterable[str]) -> str:
    if axis == "dp":
        return "dp is dp_replicate and dp_shard; name dp alone, or its two parts"
    if axis in ("edp", "ep", "etp"):
        return f"{axis} has no order of its own, as it follows those of {', '.join(DENSE_AXES)}"
    return unknown_axis(axis, wanted)
