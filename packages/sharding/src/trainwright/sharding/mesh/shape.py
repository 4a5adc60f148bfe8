"""The sizes of a mesh, and where each rank stands in it: plain data without communication."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import attrs

from trainwright.sharding.errors import NotAvailableError, ShardingError
from trainwright.sharding.mesh.axes import (
    AXES,
    DENSE_AXES,
    EXPERT_AXES,
    HYBRID_AXES,
    KNOWN_AXES,
    VIEWS,
    Number,
    number_at,
    ordered_axes,
    places_along,
    unknown_axis,
    view_of,
)
from trainwright.sharding.mesh.fitting import divisors, listed, way_to
from trainwright.sharding.mesh.order import read_order, split_dp

__all__ = ["AXES", "DENSE_AXES", "EXPERT_AXES", "HYBRID_AXES", "MeshShape"]

_MOST_LETTERS = 1000
_CHOSEN = ("pp", "dp", "cp", "tp", "ep", "etp", "dp_shard")
_SIZE = re.compile(r"\d{1,18}", re.ASCII)
_MAX_WORLD = 2**31 - 1  # to say what would fit instead of a larger one takes for ever


@attrs.frozen(repr=False)
class MeshShape:
    """Sizes of the axes of a mesh, in two views of the same ranks.

    The dense view is (pp, dp, cp, tp), the expert view (pp, edp, ep, etp). Both share pp and cut
    the same dp * cp * tp ranks of a pipeline stage, so edp follows: dp * cp * tp = edp * ep * etp.
    ``ep`` never multiplies the world. The last axis of ``order`` varies fastest; by default that is
    tp, so that it stays inside a node. An order only says which rank stands at which place: what
    a place holds, which places the expert view joins and how a communicator counts its ranks are
    the same in every order.

    Args:
        pp: Pipeline stages.
        dp: Data-parallel replicas.
        cp: Ranks that share one sequence.
        tp: Ranks that share one layer.
        ep: Ranks that share the experts of one layer.
        etp: Ranks that share one expert; None means as ``tp``.
        dp_shard: Hybrid sharding: that many consecutive dp ranks share one copy of the model
            states, and dp = dp_replicate * dp_shard. None means that dp is not split.
        order: The axes pp, dp, cp, tp, outermost first, as a sequence or as ``"dp/pp/cp/tp"``; of
            a split dp the parts dp_replicate and dp_shard can stand apart. Axes of size 1 are
            named too.

    Raises:
        ShardingError: A size is not a positive int, there are more than 2**31 - 1 ranks, ep * etp
            does not divide dp * cp * tp, dp_shard does not divide dp, or ``order`` does not have
            each axis once.
        NotAvailableError: Both dp_shard and ep > 1.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    _etp: int | None = None
    dp_shard: int | None = None
    order: tuple[str, ...] = attrs.field(default=DENSE_AXES, converter=read_order, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self._etp == self.tp:
            # Equal shapes compare equal, and etp goes on following tp in attrs.evolve.
            object.__setattr__(self, "_etp", None)
        for axis in _CHOSEN:
            size = getattr(self, axis)
            if axis == "dp_shard" and size is None:
                continue
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ShardingError(f"axis {axis} must be a positive int, got {size!r}")
        stage = self.dp * self.cp * self.tp
        if self.pp * stage > _MAX_WORLD:
            raise ShardingError(
                f"pp={self.pp} * dp={self.dp} * cp={self.cp} * tp={self.tp} must be at most "
                f"{_MAX_WORLD} ranks, got {self.pp * stage}"
            )
        if stage % (self.ep * self.etp):
            fitting = [ep for ep in divisors(stage) if stage % (ep * self.etp) == 0]
            way_out = f"ep may be {listed(fitting)}" if fitting else "choose a smaller etp"
            raise ShardingError(
                f"ep={self.ep} * etp={self.etp} must divide dp={self.dp} * cp={self.cp} * "
                f"tp={self.tp} = {stage}; with this etp, {way_out}"
            )
        self._check_split()

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Read a shape from text such as ``"dp=2,tp=2,pp=2"``; absent axes have size 1.

        It may end in an order, as ``"dp=2,pp=2,order=dp/pp/cp/tp"`` does.

        Raises:
            ShardingError: An axis is unknown or named twice, a size no positive int, or it is long.
        """
        if len(text) > _MOST_LETTERS:
            raise ShardingError(
                f"layout {text[:50]!r}... has {len(text):,} letters; write axes, such as dp=2"
            )
        chosen: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            axis, equals, size = (piece.strip() for piece in part.partition("="))
            if axis not in (*_CHOSEN, "order"):
                raise ShardingError(f"layout {text!r}: {unknown_axis(axis, _CHOSEN)}")
            if axis in chosen:
                raise ShardingError(f"layout {text!r} names axis {axis} twice; keep one of them")
            if axis == "order":
                chosen[axis] = size
                continue
            if not equals or not _SIZE.fullmatch(size) or int(size) < 1:
                raise ShardingError(
                    f"layout {text!r}: {axis} needs a positive int, got {part!r}; write {axis}=2"
                )
            chosen[axis] = int(size)
        return cls(**chosen)

    @property
    def etp(self) -> int:
        """Ranks that share one expert."""
        return self.tp if self._etp is None else self._etp

    @property
    def edp(self) -> int:
        """Replicas of each expert: what is left of a stage beside ep and etp."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def dp_replicate(self) -> int:
        """Groups of dp ranks that hold the same shards: what is left of dp beside dp_shard."""
        return 1 if self.dp_shard is None else self.dp // self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    def size(self, *axes: str) -> int:
        """Return the number of ranks along a product of axes of one view."""
        return math.prod(self._size(axis) for axis in self.ordered(axes))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return ``axes`` once each, in the order in which products of axes are written.

        That is (pp, dp, cp, tp) or (pp, edp, ep, etp), whatever the order of the ranks.

        Raises:
            ShardingError: An axis is unknown, or the axes are not all of one view.
        """
        return ordered_axes(axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on every axis of both views, and of a split dp.

        Raises:
            ShardingError: There is no such rank.
        """
        split = () if self.dp_shard is None else ("dp_replicate", "dp_shard")
        places = self.places(rank)
        return {axis: places[axis] for axis in (*AXES, *split)}

    def places(self, rank: int) -> dict[str, int]:
        """Return what `coordinates` does, and where dp is not split all the same its two parts.

        Raises:
            ShardingError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ShardingError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        return self.places_of(rank)

    def places_of(self, ranks: Number) -> dict[str, Number]:
        """Return what `places` does, of one rank or of an array of ranks at once."""
        sizes = self._sizes()
        along = places_along(ranks, split_dp(self.order), sizes)
        number = number_at(along, HYBRID_AXES, sizes)
        found: dict[str, Number] = {}
        for view in VIEWS:
            found |= places_along(number, view, sizes)
        return found

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the rank at a place of the dense view.

        Raises:
            ShardingError: A coordinate is outside its axis.
        """
        place = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        for axis, coordinate in place.items():
            if not 0 <= coordinate < self.size(axis):
                raise ShardingError(
                    f"coordinate {axis}={coordinate} is outside 0..{self.size(axis) - 1}"
                )
        return self._ranks_at([number_at(place, DENSE_AXES, self._sizes())])[0]

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` at most along ``axes``.

        They run as `ordered` writes the axes, the last one fastest, whatever the order.
        """
        varying = self.ordered(axes)
        view = view_of(varying)
        assert view is not None
        places = self.places(rank)
        members = [0]
        for axis in view:
            size = self._size(axis)
            steps = range(size) if axis in varying else (places[axis],)
            members = [member * size + step for member in members for step in steps]
        return self._ranks_at(members)

    def check(self, world_size: int) -> None:
        """Raise unless the shape has exactly ``world_size`` ranks, saying which sizes would fit.

        Raises:
            ShardingError: The sizes do not multiply to ``world_size``.
        """
        if self.world_size == world_size:
            return
        large = [axis for axis in DENSE_AXES if self.size(axis) > 1] or ["dp"]
        product = " * ".join(f"{axis}={self.size(axis)}" for axis in large)
        raise ShardingError(
            f"mesh {product} needs {self.world_size} ranks, got world_size={world_size}; "
            f"{way_to(self, world_size)}"
        )

    def table(self) -> str:
        """Return a text table with one line a rank and one column an axis."""
        dense = DENSE_AXES if self.dp_shard is None else ("pp", "dp", *HYBRID_AXES[1:])
        used = [*dense, *(EXPERT_AXES[1:] if self.ep > 1 or self.etp != self.tp else ())]
        heads = ["rank", *used]
        width = max(4, len(str(self.world_size - 1)))
        lines = ["  ".join(head.rjust(width) for head in heads)]
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            cells = [rank, *(place[axis] for axis in used)]
            lines.append("  ".join(str(cell).rjust(width) for cell in cells))
        return "\n".join(lines)

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in _CHOSEN}
        unsaid = {"etp": self.tp, "dp_shard": None}
        said = [f"{axis}={size}" for axis, size in sizes.items() if size != unsaid.get(axis, 1)]
        if self.order != DENSE_AXES:
            said.append(f"order={'/'.join(self.order)}")
        return ",".join(said) or "dp=1"

    def __repr__(self) -> str:
        return f"MeshShape.parse({str(self)!r})"

    def _size(self, axis: str) -> int:
        size: int = self.dp if axis == "dp_shard" and self.dp_shard is None else getattr(self, axis)
        return size

    def _sizes(self) -> dict[str, int]:
        return {axis: self._size(axis) for axis in KNOWN_AXES}

    def _ranks_at(self, numbers: list[int]) -> tuple[int, ...]:
        """Return the ranks at places that are counted along the axes as they are written."""
        if self.order == DENSE_AXES:
            return tuple(numbers)
        sizes = self._sizes()
        order = split_dp(self.order)
        return tuple(
            number_at(places_along(number, HYBRID_AXES, sizes), order, sizes) for number in numbers
        )

    def _check_split(self) -> None:
        if self.dp_shard is None:
            if "dp" not in self.order:
                raise ShardingError(
                    f"order {'/'.join(self.order)!r} names dp_replicate and dp_shard, but dp="
                    f"{self.dp} is not split; choose dp_shard, or name dp instead of them"
                )
            return
        if self.dp % self.dp_shard:
            raise ShardingError(
                f"dp_shard={self.dp_shard} must divide dp={self.dp}; with this dp, dp_shard may be "
                f"{listed(divisors(self.dp))}"
            )
        if self.ep > 1:
            raise NotAvailableError(
                f"hybrid sharding (dp_shard={self.dp_shard}) together with expert parallelism "
                f"(ep={self.ep}) is not available yet; leave dp_shard out, or choose ep=1"
            )
