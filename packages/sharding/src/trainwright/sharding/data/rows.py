"""Moves parameters from the ranges that ranks keep to parts cut along dims, as torch cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from trainwright.collectives import Box, Recv, Send, ShardSpec
from trainwright.sharding.data.agreement import all_gather_json
from trainwright.sharding.data.held import HeldTensor
from trainwright.sharding.data.overlaps import (
    copy_shared,
    pack_shared,
    shared_numel,
    unpack_shared,
)
from trainwright.sharding.mesh import Mesh

COPY_AXES = ("dp_shard", "cp", "tp")
"""The axes whose ranks share one copy of a stage's states."""

DATA = "data"
"""All ranks of dp and cp as one axis, in the mesh's order."""


@attrs.frozen(eq=False)
class RowPlan:
    """How one parameter goes from the ranges that ranks keep to parts along its dims.

    Args:
        name: The parameter.
        dtype: The dtype that the parts are to have.
        specs: What each rank holds that has some, by its place in ``communicator(*COPY_AXES)``.
        axes: Axes of the mesh, or `DATA`, in the order in which they cut.
        cuts: For each of them the dim that it cuts, or None where its ranks have the same.
        mesh: The mesh.
    """

    name: str
    dtype: torch.dtype
    specs: Mapping[int, ShardSpec]
    axes: Sequence[str]
    cuts: Sequence[int | None]
    mesh: Mesh

    @classmethod
    def of(
        cls,
        name: str,
        dtype: torch.dtype,
        specs: Mapping[int, ShardSpec],
        axes: Sequence[str],
        mesh: Mesh,
    ) -> RowPlan:
        """Cut dim 0 over data axes, over tp the dim that is cut there, none over dp_replicate."""
        shape = next(iter(specs.values())).global_shape
        boxes = [box for spec in specs.values() for box in spec.boxes]
        split = {dim for box in boxes for dim, size in enumerate(shape) if box.shape[dim] < size}
        special = {"dp_replicate": None, "tp": min(split, default=None)}
        rows = 0 if shape else None
        cuts = [special.get(axis, rows) for axis in axes]
        return cls(name, dtype, specs, axes, cuts, mesh)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the plain model's parameter."""
        return next(iter(self.specs.values())).global_shape

    def target(self, rank: int) -> ShardSpec:
        """Return the part of a rank of the world: a dim is cut as `torch.chunk` does."""
        start = [0] * len(self.shape)
        stop = list(self.shape)
        for axis, dim in zip(self.axes, self.cuts, strict=True):
            if dim is not None:
                part = -(-(stop[dim] - start[dim]) // axis_size(self.mesh, axis))
                first = start[dim] + axis_place(self.mesh, rank, axis) * part
                start[dim] = min(first, stop[dim])
                stop[dim] = min(first + part, stop[dim])
        return ShardSpec.of_boxes(self.name, self.shape, [Box(start, stop)])

    def sender(self, spec: ShardSpec, receiver: int, size: int) -> int:
        """Return which of the places that hold an equal part sends it: the receiver if it can."""
        holders = [place for place, other in self.specs.items() if _same_part(spec, other)]
        return min(holders, key=lambda place: (receiver - place) % size)


def move_rows(plan: RowPlan, held: HeldTensor | None) -> torch.Tensor:
    """Return this rank's part of a parameter, in its shape.

    Args:
        plan: What goes where, the same on all ranks of ``communicator(*COPY_AXES)``.
        held: What this rank holds of the parameter.

    Communicates:
        One exchange of the elements that lie on other ranks of ``communicator(*COPY_AXES)``.
    """
    group = plan.mesh.communicator(*COPY_AXES)
    target = plan.target(plan.mesh.rank)
    local = torch.empty(target.numel, dtype=plan.dtype, device=group.device)
    messages: list[Send | Recv] = []
    if held is not None:
        values = held.tensor.reshape(-1)
        copy_shared(values, held.spec, local, target)
        for peer, rank in enumerate(plan.mesh.ranks(*COPY_AXES)):
            if peer != group.rank and plan.sender(held.spec, peer, group.size) == group.rank:
                packed = pack_shared(values, held.spec, plan.target(rank))
                if packed is not None:
                    messages.append(Send(packed.to(plan.dtype), peer))
    arrivals: list[tuple[torch.Tensor, ShardSpec]] = []
    for peer, spec in plan.specs.items():
        if peer != group.rank and plan.sender(spec, group.rank, group.size) == peer:
            packed = local.new_empty(shared_numel(spec, target))
            if packed.numel():
                arrivals.append((packed, spec))
                messages.append(Recv(packed, peer))
    if messages:
        group.exchange(messages).wait()
    for packed, spec in arrivals:
        unpack_shared(packed, spec, local, target)
    return local.view(target.local_shape)


def gather_specs(mesh: Mesh, held: Mapping[str, HeldTensor]) -> dict[str, dict[int, ShardSpec]]:
    """Return by name what each rank of ``communicator(*COPY_AXES)`` holds, by its place in it."""
    mine = [item.spec.to_json() for item in held.values()]
    found: dict[str, dict[int, ShardSpec]] = {}
    for place, described in enumerate(all_gather_json(mesh.communicator(*COPY_AXES), mine)):
        for item in described:
            spec = ShardSpec.from_json(item)
            found.setdefault(spec.name, {})[place] = spec
    return found


def axis_size(mesh: Mesh, axis: str) -> int:
    """Return how many ranks there are along an axis or `DATA`."""
    return mesh.size("dp", "cp") if axis == DATA else mesh.size(axis)


def axis_place(mesh: Mesh, rank: int, axis: str) -> int:
    """Return where a rank of the world stands along an axis or `DATA`."""
    places = mesh.shape.places(rank)
    if axis == DATA:
        return places["dp"] * mesh.size("cp") + places["cp"]
    return places[axis]


def _same_part(spec: ShardSpec, other: ShardSpec) -> bool:
    return (spec.start, spec.stop, spec.boxes) == (other.start, other.stop, other.boxes)
