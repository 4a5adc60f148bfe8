"""Plans that need no costs: by hand, by the square root, and by Chen's recursion."""

from __future__ import annotations

from itertools import pairwise

from trainwright.checkpointing.errors import PlanError

from .plan import ChainPlan, Item, Kept, Region


def keep_all_plan(num_layers: int) -> ChainPlan:
    """Return the plan that recomputes nothing."""
    _check_count("num_layers", num_layers)
    return ChainPlan(_kept(0, num_layers))


def every_plan(num_layers: int, length: int) -> ChainPlan:
    """Return the plan that keeps the input of every ``length``-th layer and nothing else."""
    _check_count("num_layers", num_layers)
    _check_count("length", length)
    starts = range(0, num_layers, length)
    return ChainPlan([Region(_kept(s, min(s + length, num_layers))) for s in starts])


def recompute_all_plan(num_layers: int) -> ChainPlan:
    """Return the plan that keeps each layer's input and nothing else ("full")."""
    return every_plan(num_layers, 1)


def sqrt_segments(num_layers: int, *, layer_bytes: float = 1.0, input_bytes: float = 1.0) -> int:
    """Return the number of equal regions at which the peak is lowest, the fewest of them.

    The peak is ``segments * input_bytes + ceil(num_layers / segments) * layer_bytes``; the best
    number is about ``sqrt(num_layers * layer_bytes / input_bytes)``.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.3; Narayanan et al. 2021,
    arXiv:2104.04473, section 3.5.
    """
    _check_count("num_layers", num_layers)
    if not (layer_bytes >= 0 and input_bytes >= 0):
        raise PlanError(f"sizes must be at least 0, got {layer_bytes!r} and {input_bytes!r}")

    def peak(segments: int) -> float:
        return segments * input_bytes + -(-num_layers // segments) * layer_bytes

    return min(range(1, num_layers + 1), key=peak)


def sqrt_plan(num_layers: int, *, layer_bytes: float = 1.0, input_bytes: float = 1.0) -> ChainPlan:
    """Return the plan of equal regions at which the peak is lowest; see `sqrt_segments`."""
    segments = sqrt_segments(num_layers, layer_bytes=layer_bytes, input_bytes=input_bytes)
    return every_plan(num_layers, -(-num_layers // segments))


def recursive_plan(num_layers: int, splits: int = 1) -> ChainPlan:
    """Return Chen's recursion: cut into ``splits + 1`` parts, and each part again.

    The memory is ``splits * log(num_layers)`` to the base ``splits + 1``; each level of the
    recursion runs the chain forward at most once more.

    Source: Chen et al. 2016, arXiv:1604.06174, section 4.4.
    """
    _check_count("num_layers", num_layers)
    _check_count("splits", splits)
    return ChainPlan(_cut(0, num_layers, splits + 1))


def _cut(first: int, end: int, parts: int) -> tuple[Item, ...]:
    count = end - first
    if count <= 1:
        return _kept(first, end)
    parts = min(parts, count)
    bounds = [first + count * part // parts for part in range(parts + 1)]
    *regions, last = pairwise(bounds)
    items: list[Item] = [Region(_cut(start, stop, parts)) for start, stop in regions]
    return (*items, *_cut(*last, parts))


def _kept(first: int, end: int) -> tuple[Item, ...]:
    return tuple(Kept(layer) for layer in range(first, end))


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise PlanError(f"{name} must be a whole number, at least 1, got {value!r}")
