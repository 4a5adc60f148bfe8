"""The names of the axes, in which views they stand, and numbers written in places along them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from trainwright.sharding.errors import ShardingError

STAGE_AXES = ("dp", "cp", "tp")
"""The dense axes of a stage of the pipeline."""

DENSE_AXES = ("pp", *STAGE_AXES)
"""The axes along which dense layers are arranged, outermost first."""

EXPERT_AXES = ("pp", "edp", "ep", "etp")
"""The axes along which the experts of a layer are arranged, outermost first."""

HYBRID_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The dense view with dp in its two parts: groups that replicate each other, ranks of a group."""

AXES = ("pp", "dp", "cp", "tp", "edp", "ep", "etp")
"""The axes a parameter can be placed on, in the order in which products of axes are written."""

VIEWS = (DENSE_AXES, EXPERT_AXES, HYBRID_AXES)
"""Every way to see the ranks; the axes of a product are all of one of them."""

KNOWN_AXES = (*AXES, "dp_replicate", "dp_shard")
"""All names there are."""

Number = TypeVar("Number", int, NDArray[np.int64])


def view_of(axes: Iterable[str]) -> tuple[str, ...] | None:
    """Return the first view that has all of ``axes``, None where none has."""
    named = set(axes)
    return next((view for view in VIEWS if named <= set(view)), None)


def ordered_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return ``axes`` once each, as their view writes them.

    Raises:
        ShardingError: An axis is unknown, or the axes are not all of one view.
    """
    named = tuple(axes)
    for axis in named:
        if axis not in KNOWN_AXES:
            raise ShardingError(unknown_axis(axis, KNOWN_AXES))
    view = view_of(named)
    if view is None:
        raise ShardingError(
            f"axes {', '.join(named)} belong to two views of the mesh; take them from "
            f"{DENSE_AXES}, from {EXPERT_AXES} or from {HYBRID_AXES}"
        )
    return tuple(axis for axis in view if axis in named)


def unknown_axis(axis: object, known: Iterable[str]) -> str:
    """Return what to say about a name that is not among ``known``."""
    names = list(known)
    near = difflib.get_close_matches(str(axis), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown axis {axis!r}; the axes are {', '.join(names)}{hint}"


def places_along(
    number: Number, axes: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, Number]:
    """Return the place on each axis of a number that counts along them, the last one fastest."""
    found: dict[str, Number] = {}
    for axis in reversed(axes):
        found[axis] = number % sizes[axis]
        number = number // sizes[axis]
    return found


def number_at(
    places: Mapping[str, Number], axes: Sequence[str], sizes: Mapping[str, int]
) -> Number:
    """Return the number at a place: the inverse of `places_along`."""
    number = places[axes[0]]
    for axis in axes[1:]:
        number = number * sizes[axis] + places[axis]
    return number
