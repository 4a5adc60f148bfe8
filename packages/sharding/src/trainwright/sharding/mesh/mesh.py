"""A mesh with one communicator for each axis and for each product of axes."""

from __future__ import annotations

from itertools import combinations

from trainwright.collectives import Communicator, SingleCommunicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.shape import DENSE_AXES, EXPERT_AXES, HYBRID_AXES, MeshShape

_ENDS = "pp_ends"


class Mesh:
    """The ranks of a communicator, arranged along the axes of a `MeshShape`.

    Every axis and every product of axes of one view has its communicator; ranks in it are ordered
    as the mesh orders them, outermost axis first. An axis of size 1 costs nothing. Two products
    that join the same ranks share one communicator.

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

    def _communicator_of_ends(self) -> Communicator:
        if self._ends is None:
            raise ShardingError(
                f"rank {self.rank} is on stage {self.coordinate('pp')} of pp={self.size('pp')}; "
                f"{_ENDS!r} joins the first and the last stage, so ask for it only there"
            )
        return self._ends

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
