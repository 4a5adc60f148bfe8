"""Sub-meshes: which axes of a mesh a part of it keeps, and what they are called there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.axes import DENSE_AXES, EXPERT_AXES, HYBRID_AXES
from trainwright.sharding.mesh.shape import MeshShape


@attrs.frozen
class Part:
    """The shape of a sub-mesh, and for each of its axes the axes of the whole mesh it runs along.

    Args:
        shape: Of the sub-mesh.
        axes: The axes of the whole mesh that are kept, as products are written.
        names: By axis of the sub-mesh; an axis that is absent there has one rank.
    """

    shape: MeshShape
    axes: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, whole: MeshShape, axes: Iterable[str]) -> Part:
        """Return the part that keeps ``axes``.

        Raises:
            ShardingError: An axis is unknown or of the expert view.
        """
        kept = _dense(whole, axes)
        dp = tuple(axis for axis in kept if axis.startswith("dp"))
        is_split = whole.dp_shard is not None and dp == ("dp",)
        shape = MeshShape(
            pp=whole.pp if "pp" in kept else 1,
            cp=whole.cp if "cp" in kept else 1,
            tp=whole.tp if "tp" in kept else 1,
            dp=whole.size(*dp) if dp else 1,
            dp_shard=whole.dp_shard if is_split else None,
        )
        names: dict[str, tuple[str, ...]] = {
            axis: (axis,) for axis in ("pp", "cp", "tp") if axis in kept
        }
        names |= {"dp": dp, "dp_shard": ("dp_shard",) if is_split else dp}
        names |= {"dp_replicate": ("dp_replicate",)} if is_split else {}
        if shape.dp * shape.cp * shape.tp == whole.dp * whole.cp * whole.tp:
            shape = attrs.evolve(shape, ep=whole.ep, etp=whole.etp)
            names |= {axis: (axis,) for axis in EXPERT_AXES if axis != "pp"}
        else:
            names |= {"edp": (*dp, *names.get("cp", ())), "etp": names.get("tp", ())}
        return cls(shape, kept, names)

    def here(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes of the whole mesh along which ``axes`` of the sub-mesh run."""
        return tuple(name for axis in axes for name in self.names.get(axis, ()))


def check_coordinates(shape: MeshShape, coordinates: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes that are left where some coordinates are fixed.

    Raises:
        ShardingError: An axis is unknown, or a coordinate outside it.
    """
    fixed = _dense(shape, coordinates)
    for axis, place in coordinates.items():
        if not 0 <= place < shape.size(axis):
            raise ShardingError(f"coordinate {axis}={place} is outside 0..{shape.size(axis) - 1}")
    view = HYBRID_AXES if {"dp_replicate", "dp_shard"} & set(fixed) else DENSE_AXES
    return tuple(axis for axis in view if axis not in fixed)


def _dense(shape: MeshShape, axes: Iterable[str]) -> tuple[str, ...]:
    """Return axes of the dense view as products are written, both parts of dp as dp."""
    named = shape.ordered(axes)
    for axis in named:
        if axis in EXPERT_AXES and axis != "pp":
            raise ShardingError(
                f"a sub-mesh is cut along {', '.join(DENSE_AXES)}, got {axis}; take "
                f"communicator({axis!r}) for the ranks along it"
            )
    if {"dp_replicate", "dp_shard"} <= set(named):
        joined = {*named, "dp"} - {"dp_replicate", "dp_shard"}
        return tuple(axis for axis in DENSE_AXES if axis in joined)
    return named
