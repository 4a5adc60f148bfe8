"""How a parameter and its gradient are placed, and what follows: reductions, norm, shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
from torch import nn

from trainwright.collectives import Box, ShardSpec
from trainwright.sharding.divisions import check_divides
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.mesh import Mesh
from trainwright.sharding.mesh.shape import AXES
from trainwright.sharding.placement.values import Partial, Placement, Replicate, Shard
from trainwright.sharding.protocol import ParallelModule

if TYPE_CHECKING:
    from trainwright.sharding.tensor.cuts import Cut

_DENSE = ("dp", "cp", "tp")
_EXPERT = ("edp", "ep", "etp")
_DATA = ("dp", "cp", "edp")


def _to_shape(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sizes)


def _to_boxes(boxes: Iterable[Box]) -> tuple[Box, ...]:
    return tuple(boxes)


def _to_dict(placements: Mapping[str, Placement]) -> dict[str, Placement]:
    return dict(placements)


@attrs.frozen
class ParameterPlacement:
    """Where one parameter lies on the axes of a pipeline stage, and what its raw gradient is.

    The axes are dp, cp, tp, or edp, ep, etp where one of these is named. A stage owns its
    parameters: pp counts only where it is named, for a weight that several stages hold.

    Args:
        global_shape: Shape of the parameter in the plain model.
        boxes: The parts of the global tensor on this rank, in the order in which they are kept.
        weight: `Replicate` or `Shard` by axis; an axis that is absent is `Replicate`.
        gradient: By axis, what the gradient is that one rank's backward computes: `Partial` where
            each rank sees only part of it and the sum is wanted, `Replicate` where every rank
            computes the same, `Shard` where the weight is. An axis that is absent is `Shard` where
            the weight is, else `Partial` on dp, cp and edp, else `Replicate`.

    Raises:
        ShardingError: An axis is unknown, weight and gradient contradict each other, or a box does
            not fit the shape.
    """

    global_shape: tuple[int, ...] = attrs.field(converter=_to_shape)
    boxes: tuple[Box, ...] = attrs.field(converter=_to_boxes)
    weight: Mapping[str, Placement] = attrs.field(factory=dict, converter=_to_dict)
    gradient: Mapping[str, Placement] = attrs.field(factory=dict, converter=_to_dict)

    def __attrs_post_init__(self) -> None:
        for axis in {**self.weight, **self.gradient}:
            if axis not in AXES:
                raise ShardingError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        mixed = set(_DENSE) & self._named and set(_EXPERT) & self._named
        if mixed:
            raise ShardingError(
                f"a parameter lies on {_DENSE} or on {_EXPERT}, got {sorted(self._named)}"
            )
        for axis in self.axes:
            self._check_axis(axis)
        for box in self.boxes:
            inside = len(box.stop) == len(self.global_shape) and all(
                stop <= size for stop, size in zip(box.stop, self.global_shape, strict=True)
            )
            if not inside:
                raise ShardingError(f"{box} is not inside global shape {self.global_shape}")

    @classmethod
    def replicated(
        cls, global_shape: Sequence[int], gradient: Mapping[str, Placement] | None = None
    ) -> ParameterPlacement:
        """Return the placement of a parameter that every rank of a stage holds whole.

        Args:
            global_shape: Shape of the parameter.
            gradient: As in the class, for instance ``{"tp": Partial()}`` for a norm that each
                tensor rank applies to other heads or other positions.
        """
        shape = tuple(global_shape)
        return cls(shape, (Box.full(shape),), {}, gradient or {})

    @classmethod
    def sharded(
        cls, global_shape: Sequence[int], dim: int, *, rank: int, size: int, axis: str = "tp"
    ) -> ParameterPlacement:
        """Return the placement of a parameter cut into equal parts along one dimension.

        Args:
            global_shape: Shape of the whole parameter.
            dim: The dimension that is cut.
            rank: This rank on the axis.
            size: Ranks on the axis.
            axis: The axis.

        Raises:
            ShardingError: ``size`` does not divide the dimension.
        """
        shape = tuple(global_shape)
        check_divides(shape[dim], size, f"dim {dim} of shape {shape}", axis)
        part = shape[dim] // size
        start = [0] * len(shape)
        stop = list(shape)
        start[dim] = rank * part
        stop[dim] = (rank + 1) * part
        return cls(shape, (Box(start=tuple(start), stop=tuple(stop)),), {axis: Shard(dim)})

    @classmethod
    def cut(
        cls, global_shape: Sequence[int], dim: int, cut: Cut, *, rank: int, axis: str = "tp"
    ) -> ParameterPlacement:
        """Return the placement of a parameter of which each rank holds the indices of a cut.

        Args:
            global_shape: Shape of the whole parameter.
            dim: The dimension that is cut.
            cut: Which indices of it each rank of the axis holds.
            rank: This rank on the axis.
            axis: The axis.

        Raises:
            ShardingError: The dimension does not have the cut's size, or an index lies on several
                ranks or on none.
        """
        shape = tuple(global_shape)
        boxes = cut.boxes(shape, dim, rank)
        if not cut.is_partition:
            raise ShardingError(
                f"dim {dim} of shape {shape} can be cut only so that each index lies on one rank, "
                f"got {cut}; a parameter that every rank holds whole is "
                "ParameterPlacement.replicated, told what its gradient is"
            )
        return cls(shape, boxes, {axis: Shard(dim % len(shape))})

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which the parameter is placed, outermost first."""
        view = _EXPERT if set(_EXPERT) & self._named else _DENSE
        return ("pp", *view) if "pp" in self._named else view

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold the same weight: only coordinate 0 counts and saves it."""
        return tuple(axis for axis in self.axes if self.weight_on(axis) == Replicate())

    @property
    def reduction_axes(self) -> tuple[str, ...]:
        """The axes over which the raw gradient must be summed, and no other."""
        return tuple(axis for axis in self.axes if self.gradient_on(axis) == Partial())

    def weight_on(self, axis: str) -> Placement:
        """Return how the weight lies on one axis."""
        return self.weight.get(axis, Replicate())

    def gradient_on(self, axis: str) -> Placement:
        """Return what the raw gradient is on one axis."""
        if axis in self.gradient:
            return self.gradient[axis]
        if isinstance(self.weight_on(axis), Shard):
            return self.weight_on(axis)
        return Partial() if axis in _DATA else Replicate()

    @property
    def _named(self) -> set[str]:
        return {*self.weight, *self.gradient}

    def _check_axis(self, axis: str) -> None:
        weight = self.weight_on(axis)
        gradient = self.gradient_on(axis)
        if isinstance(weight, Partial):
            raise ShardingError(f"a weight cannot be Partial on {axis}; only gradients can")
        if isinstance(weight, Shard) and weight.dim >= len(self.global_shape):
            raise ShardingError(
                f"{weight} on {axis} is outside the {len(self.global_shape)} dimensions of "
                f"shape {self.global_shape}"
            )
        if isinstance(weight, Shard) != isinstance(gradient, Shard) or (
            isinstance(weight, Shard) and weight != gradient
        ):
            raise ShardingError(
                f"on {axis} the weight is {weight} but its gradient {gradient}; a shard's gradient "
                "is the same shard, and a replicated weight's is Replicate() or Partial()"
            )


def placements_of(model: nn.Module) -> dict[str, ParameterPlacement]:
    """Return the placement of every parameter of a model, by its name in the model.

    Modules with ``parameter_placements()`` speak for their direct parameters; a parameter nobody
    speaks for is whole on every rank of its stage, and its gradient is summed over dp and cp. A
    parameter with several names is listed under the first, as `nn.Module.named_parameters` does.

    Args:
        model: This rank's module.

    Returns:
        One placement a parameter, in the order of ``model.named_parameters()``.

    Raises:
        ShardingError: A module speaks for a parameter that is not its own, two modules place a
            shared parameter differently, or a parameter does not have the size of its boxes.
    """
    spoken: dict[int, tuple[str, ParameterPlacement]] = {}
    for name, parameter, placement in _statements(model):
        held = sum(box.numel for box in placement.boxes)
        if parameter.numel() != held:
            raise ShardingError(
                f"{name} has {parameter.numel()} elements but its boxes hold {held}"
            )
        first_name, first = spoken.setdefault(id(parameter), (name, placement))
        if first != placement:
            raise ShardingError(
                f"{first_name} and {name} are one parameter but are placed differently: "
                f"{first} and {placement}"
            )
    return {
        name: spoken[id(parameter)][1]
        if id(parameter) in spoken
        else ParameterPlacement.replicated(parameter.shape)
        for name, parameter in model.named_parameters()
    }


def shard_spec(name: str, placement: ParameterPlacement, mesh: Mesh) -> ShardSpec:
    """Return the spec of this rank's part of a parameter.

    Args:
        name: The parameter's name in the plain model.
        placement: Where it lies.
        mesh: Says which axes have more than one rank; the others are not listed as replicated.
    """
    replicated = tuple(axis for axis in placement.replicated_axes if mesh.size(axis) > 1)
    return ShardSpec.of_boxes(name, placement.global_shape, placement.boxes, replicated)


def _statements(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParameterPlacement]]:
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not isinstance(module, ParallelModule):
            continue
        for name, placement in module.parameter_placements().items():
            full_name = f"{path}.{name}" if path else name
            if name not in own:
                raise ShardingError(
                    f"{full_name}: {type(module).__name__} places a parameter it does not have; "
                    f"its own are {', '.join(own) or 'none'}"
                )
            yield full_name, own[name], placement
