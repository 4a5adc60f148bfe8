"""A mesh with one communicator for each axis and for each product of axes."""

from __future__ import annotations

from itertools import combinations

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.shape import DENSE_AXES, EXPERT_AXES, MeshShape


class Mesh:
    """The ranks of a communicator, arranged along the axes of a `MeshShape`.

    Every axis and every product of axes of one view has its communicator; ranks in it are ordered
    as the mesh orders them, outermost axis first. An axis of size 1 costs nothing. Two products
    that join the same ranks share one communicator.

    Args:
        world: All ranks of the job.
        shape: The sizes; they multiply to ``world.size``.

    Raises:
        ShardingError: The sizes do not multiply to ``world.size``.

    Communicates:
        One ``world.split`` for each distinct grouping, in the same order on every rank.
    """

    def __init__(self, world: Communicator, shape: MeshShape) -> None:
        shape.check(world.size)
        self._world = world
        self._shape = shape
        self._coordinates = shape.coordinates(world.rank)
        self._communicators = _split_all(world, shape)

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
        """This rank's place on every axis of both views."""
        return dict(self._coordinates)

    def coordinate(self, axis: str) -> int:
        """Return this rank's place on one axis."""
        self._shape.ordered((axis,))
        return self._coordinates[axis]

    def size(self, *axes: str) -> int:
        """Return the number of ranks along a product of axes of one view."""
        return self._shape.size(*axes)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the world ranks of ``communicator(*axes)``, in its order."""
        return self._shape.ranks(self.rank, *axes)

    def communicator(self, *axes: str) -> Communicator:
        """Return the communicator of the ranks that differ from this one at most along ``axes``.

        Raises:
            ShardingError: An axis is unknown, or the axes belong to two views.
        """
        if not axes:
            raise ShardingError("communicator() needs at least one axis, such as 'dp'")
        return self._communicators[self._shape.ordered(axes)]

    def __repr__(self) -> str:
        return f"Mesh({str(self._shape)!r}, rank={self.rank} of {self._world.size})"


def _split_all(world: Communicator, shape: MeshShape) -> dict[tuple[str, ...], Communicator]:
    # Every rank walks the same products in the same order: split is collective, and a rank that
    # took another order would join another group's split. The group of rank 0 identifies a whole
    # grouping: only one set of offsets tiles the ranks with it.
    single = SingleCommunicator(device=world.device)
    made: dict[tuple[int, ...], Communicator] = {tuple(range(world.size)): world}
    found: dict[tuple[str, ...], Communicator] = {}
    for axes in _products():
        if world.size > 1 and shape.size(*axes) == 1:
            found[axes] = single
            continue
        grouping = shape.ranks(0, *axes)
        if grouping not in made:
            lowest = shape.ranks(world.rank, *axes)[0]
            part = world.split(color=lowest, key=world.rank)
            assert part is not None
            made[grouping] = part
        found[axes] = made[grouping]
    return found


def _products() -> list[tuple[str, ...]]:
    products = [
        axes
        for count in range(1, len(DENSE_AXES) + 1)
        for view in (DENSE_AXES, EXPERT_AXES)
        for axes in combinations(view, count)
    ]
    return list(dict.fromkeys(products))
