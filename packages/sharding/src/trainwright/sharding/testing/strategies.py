"""Hypothesis strategies: mesh shapes, layouts of a world, sizes that ranks can share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trainwright.sharding.mesh.shape import DENSE_AXES, HYBRID_AXES, MeshShape


@st.composite
def mesh_shapes(
    draw: st.DrawFn,
    max_world_size: int = 8,
    axes: tuple[str, ...] = DENSE_AXES,
    *,
    hybrid: bool = False,
) -> MeshShape:
    """Draw a shape of at most ``max_world_size`` ranks with sizes above 1 on some of ``axes``.

    With all dense axes an expert view is drawn as well; with ``hybrid`` dp is split instead.
    """
    left = max_world_size
    sizes: dict[str, Any] = {}
    for axis in draw(st.permutations(axes)):
        sizes[axis] = draw(st.integers(1, left))
        left //= sizes[axis]
    if hybrid:
        return MeshShape(**sizes, dp_shard=draw(st.sampled_from(_divisors(sizes.get("dp", 1)))))
    if axes != DENSE_AXES:
        return MeshShape(**sizes)
    stage = MeshShape(**sizes).world_size // sizes["pp"]
    etp = draw(st.sampled_from(_divisors(stage)))
    ep = draw(st.sampled_from(_divisors(stage // etp)))
    return MeshShape(**sizes, ep=ep, etp=etp)


@st.composite
def layouts_of(draw: st.DrawFn, world_size: int) -> MeshShape:
    """Draw a shape of exactly ``world_size`` ranks over the dense axes."""
    left = world_size
    sizes: dict[str, Any] = {}
    for axis in draw(st.permutations(DENSE_AXES)):
        sizes[axis] = draw(st.sampled_from(_divisors(left)))
        left //= sizes[axis]
    sizes["dp"] *= left
    return MeshShape(**sizes)


def orders(*, split: bool = False) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw an order of the axes of a mesh; with ``split`` the parts of dp go their own ways."""
    return st.permutations(HYBRID_AXES if split else DENSE_AXES).map(tuple)


def shard_sizes(parts: int, max_part: int = 4) -> st.SearchStrategy[int]:
    """Draw a size that ``parts`` ranks can share equally."""
    return st.integers(1, max_part).map(lambda part: part * parts)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
