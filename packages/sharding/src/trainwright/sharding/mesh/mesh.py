"""A mesh with one communicator for each axis and for each product of axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar, cast

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import devices
from trainwright.sharding.mesh.parts import Part, check_coordinates
from trainwright.sharding.mesh.shape import DENSE_AXES, EXPERT_AXES, HYBRID_AXES, MeshShape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ENDS = "pp_ends"

_T = TypeVar("_T")


class Mesh:
    """The ranks of a communicator, arranged along the axes of a `MeshShape`.

    Every axis and every product of axes of one view has its communicator. Ranks in it are counted
    as `MeshShape.ordered` writes the axes, the last one fastest, whatever the order of the mesh: so
    a shard depends on the place of its rank alone. An axis of size 1 costs nothing. Two products
    that join the same ranks in the same order share one communicator.

    Where ``shape.dp_shard`` splits dp, "dp_replicate" and "dp_shard" are axes too; where it does
    not, "dp_shard" is all of dp. "pp_ends" joins the first and the last pipeline stage of equal
    other coordinates, and exists on their ranks only.

    Args:
        world: All ranks of the job.
        shape: The sizes; they multiply to ``world.size``.

    Raises:
        ShardingError: The sizes do not multiply to ``world.size``.

    Communicates:
        One ``world.split`` for each distinct grouping, and one for the ends of a pipeline, in the
        same order on every rank.
    """

    def __init__(self, world: Communicator, shape: MeshShape) -> None:
        shape.check(world.size)
        self._world = world
        self._shape = shape
        self._places = shape.places(world.rank)
        self._communicators = _split_all(world, shape)
        self._ends = _split_ends(world, shape)
        self._shared: dict[str, Any] = {}

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        axes: Sequence[str] | None = None,
        *,
        ep: int = 1,
        etp: int | None = None,
        world: Communicator | None = None,
    ) -> Mesh:
        """Return the mesh whose places are those of a mesh of torch.distributed.

        Ranks are counted as torch counts them where an order of the axes can say how they lie in
        ``device_mesh``, else row by row.

        Args:
            device_mesh: Its dims are axes of the dense view, dp whole or in its two parts; an
                axis that is absent has size 1.
            axes: The axis of each dim; None takes ``device_mesh.mesh_dim_names``.
            ep: As in `MeshShape`.
            etp: As in `MeshShape`.
            world: A communicator of the ranks of ``device_mesh``, in the order in which they are
                counted; None makes one from the default process group.

        Raises:
            ShardingError: A dim has no name, or one that is no axis; ``world`` has other ranks; or
                this rank is not in ``device_mesh`` (it has taken part in making the world then).

        Communicates:
            Without ``world``, every rank of the default process group calls it, each with the
            device mesh it is in. One split where that group is not the world itself, then as
            `Mesh`.
        """
        shape, joined = devices.join_device_mesh(device_mesh, axes, ep, etp, world)
        return cls(joined, shape)

    def to_device_mesh(self, *axes: str, device_type: str | None = None) -> DeviceMesh:
        """Return a mesh of torch.distributed over the same ranks.

        Args:
            *axes: Its dims, outermost first, all of one view; they include each axis of more than
                one rank. None given: these axes, in the order of the mesh.
            device_type: As torch names it; None takes the world's.

        Raises:
            ShardingError: On every rank alike: there is no default process group, the mesh does
                not have all of its ranks, or an axis is missing.

        Communicates:
            One all-gather of 8 bytes a rank, and what torch needs for a process group a dim.
        """
        return devices.make_device_mesh(self._world, self._shape, axes, device_type)

    def submesh(self, *axes: str) -> Mesh:
        """Return the mesh of the ranks that differ from this one at most along ``axes``.

        Its other axes have size 1. It joins no ranks anew: its communicators are this mesh's. Where
        a whole pipeline stage is kept its expert view is too; otherwise that has ep=1 and etp=tp.

        Args:
            *axes: Of the dense view; dp_shard or dp_replicate alone is the dp of the sub-mesh.

        Raises:
            ShardingError: An axis is unknown or of the expert view.
        """
        if not axes:
            raise ShardingError("submesh() needs at least one axis to keep, such as 'tp'")
        return self._part(Part.of(self._shape, axes))

    def submesh_at(self, **coordinates: int) -> Mesh | None:
        """Return the mesh of the ranks at some coordinates; None where this rank is elsewhere.

        The axes that are not named are kept, as in `submesh`; nothing is communicated.

        Args:
            **coordinates: By axis of the dense view, as in ``submesh_at(pp=0)``.

        Raises:
            ShardingError: An axis is unknown, or a coordinate outside it.
        """
        kept = check_coordinates(self._shape, coordinates)
        if any(self._places[axis] != place for axis, place in coordinates.items()):
            return None
        return self._part(Part.of(self._shape, kept))

    @property
    def world(self) -> Communicator:
        """The communicator of all ranks."""
        return self._world

    @property
    def shape(self) -> MeshShape:
        """The sizes of the axes."""
        return self._shape

    @property
    def rank(self) -> int:
        """This rank in the world."""
        return self._world.rank

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on every axis of both views, and of a split dp."""
        return self._shape.coordinates(self.rank)

    def coordinate(self, axis: str) -> int:
        """Return this rank's place on one axis."""
        self._shape.ordered((axis,))
        return self._places[axis]

    def size(self, *axes: str) -> int:
        """Return the number of ranks along a product of axes of one view."""
        return self._shape.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the world ranks of ``communicator(*axes)``, in its order."""
        return self._shape.ranks(self.rank, *axes)

    def communicator(self, *axes: str) -> Communicator:
        """Return the communicator of the ranks that differ from this one at most along ``axes``.

        ``communicator("pp_ends")`` joins this rank and the one at the other end of the pipeline.

        Raises:
            ShardingError: An axis is unknown, the axes belong to two views, or this rank is at
                neither end of the pipeline.
        """
        if not axes:
            raise ShardingError("communicator() needs at least one axis, such as 'dp'")
        if axes == (_ENDS,):
            return self._communicator_of_ends()
        return self._communicators[self._shape.ordered(axes)]

    def shared(self, name: str, make: Callable[[], _T]) -> _T:
        """Return what all layers over this mesh share under a name, made when first asked for."""
        if name not in self._shared:
            self._shared[name] = make()
        return cast(_T, self._shared[name])

    def _communicator_of_ends(self) -> Communicator:
        if self._ends is None:
            raise ShardingError(
                f"rank {self.rank} is on stage {self.coordinate('pp')} of pp={self.size('pp')}; "
                f"{_ENDS!r} joins the first and the last stage, so ask for it only there"
            )
        return self._ends

    def _part(self, part: Part) -> Mesh:
        single = SingleCommunicator(device=self._world.device)

        def joining(axes: Sequence[str]) -> Communicator:
            wide = [axis for axis in axes if self._shape.size(axis) > 1]
            return self.communicator(*wide) if wide else single

        mesh = object.__new__(type(self))
        mesh._world = joining(part.axes)
        mesh._shape = part.shape
        mesh._places = part.shape.places(mesh._world.rank)
        mesh._communicators = {axes: joining(part.here(axes)) for axes in _products()}
        mesh._ends = single if part.shape.pp == 1 else self._ends
        mesh._shared = {}
        return mesh

    def __repr__(self) -> str:
        return f"Mesh({str(self._shape)!r}, rank={self.rank} of {self._world.size})"


def _split_all(world: Communicator, shape: MeshShape) -> Mapping[tuple[str, ...], Communicator]:
    # Every rank walks the same products in the same order: split is collective, and a rank that
    # took another order would join another group's split. The group of rank 0 identifies a whole
    # grouping: by places, only one set of offsets tiles the ranks with it.
    single = SingleCommunicator(device=world.device)
    made: dict[tuple[int, ...], Communicator] = {tuple(range(world.size)): world}
    found: dict[tuple[str, ...], Communicator] = {}
    for axes in _products():
        if world.size > 1 and shape.size(*axes) == 1:
            found[axes] = single
            continue
        grouping = shape.ranks(0, *axes)
        if grouping not in made:
            members = shape.ranks(world.rank, *axes)
            part = world.split(color=members[0], key=members.index(world.rank))
            assert part is not None
            made[grouping] = part
        found[axes] = made[grouping]
    return found


def _split_ends(world: Communicator, shape: MeshShape) -> Communicator | None:
    # Of its own even where pp = 2: a sum over the ends must not meet the messages of a pipeline.
    if shape.pp == 1:
        return SingleCommunicator(device=world.device)
    stage = shape.coordinates(world.rank)["pp"]
    is_end = stage in (0, shape.pp - 1)
    return world.split(color=shape.ranks(world.rank, "pp")[0] if is_end else None, key=world.rank)


def _products() -> list[tuple[str, ...]]:
    products = [
        axes
        for count in range(1, len(HYBRID_AXES) + 1)
        for view in (DENSE_AXES, EXPERT_AXES, HYBRID_AXES)
        for axes in combinations(view, count)
    ]
    return list(dict.fromkeys(products))
