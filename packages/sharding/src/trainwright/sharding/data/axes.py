"""Which communicators a group's gradients and weights travel on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from trainwright.collectives import Communicator, ShardSpec, SingleCommunicator
from trainwright.sharding.data.away import Turns
from trainwright.sharding.data.layout import GroupKey
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.placement import Placement, Shard

_ENDS = "pp_ends"


class DataAxes:
    """The communicators of a stage's groups; each distinct one for gathers is made once.

    Args:
        mesh: The ranks.
        stage: The stage; from 1 on, a mesh whose dp is split cuts over dp_shard only.

    Communicates:
        One split a distinct set of axes, when `gathers` is first asked for it.
    """

    def __init__(self, mesh: Mesh, stage: int) -> None:
        self._mesh = mesh
        self._is_hybrid = stage > 0 and mesh.size("dp_replicate") > 1
        self._gathers: dict[tuple[str, ...], Communicator] = {}
        self._turns: dict[tuple[str, ...], Turns] = {}

    def data(self, key: GroupKey) -> Communicator:
        """Return what joins the ranks that buckets are reduced over first, and cut for."""
        axes = self.cut_axes(key)
        if not axes:
            return SingleCommunicator(device=self._mesh.world.device)
        return self._mesh.communicator(*axes)

    def gathers(self, key: GroupKey) -> Communicator:
        """Return the same ranks for gathers: their order is that of the calls on it alone."""
        axes = self.cut_axes(key)
        if axes not in self._gathers:
            data = self.data(key)
            part = data.split(0, data.rank) if data.size > 1 else data
            assert part is not None
            self._gathers[axes] = part
        return self._gathers[axes]

    def turns(self, key: GroupKey) -> Turns:
        """Return the order of gathers on the communicator of `gathers`."""
        return self._turns.setdefault(self.cut_axes(key), Turns())

    def cut_weights(self, entry_axes: Mapping[str, Placement]) -> tuple[str, ...]:
        """Return the axes of several ranks on which a weight is cut, by its placement."""
        found = (axis for axis, place in entry_axes.items() if isinstance(place, Shard))
        return tuple(sorted(axis for axis in found if self._mesh.size(axis) > 1))

    def over(self, axis: str) -> Communicator:
        """Return the ranks along one axis."""
        return self._mesh.communicator(axis)

    def partial(self, key: GroupKey) -> tuple[Communicator, ...]:
        """Return what joins the ranks whose sums are added afterwards, one an axis."""
        axes = [axis for axis in key.partial_axes if self._mesh.size(axis) > 1]
        if self._is_hybrid and "dp" in key.data_axes:
            axes.insert(0, "dp_replicate")
        return tuple(self._mesh.communicator(_joined(axis)) for axis in axes)

    def cut(self, spec: ShardSpec, key: GroupKey) -> ShardSpec:
        """Return a whole local spec without the axes whose ranks keep other elements now."""
        replicated: list[str] = []
        for axis in spec.replicated:
            if axis not in key.data_axes:
                replicated.append(axis)
            elif axis == "dp" and self._is_hybrid:
                replicated.append("dp_replicate")
        return ShardSpec(
            spec.name, spec.global_shape, spec.boxes, spec.start, spec.stop, replicated
        )

    def cut_axes(self, key: GroupKey) -> tuple[str, ...]:
        """Return the data axes over whose ranks a group's buckets are cut from stage 1 on."""
        if not self._is_hybrid:
            return key.data_axes
        return tuple("dp_shard" if axis == "dp" else axis for axis in key.data_axes)

    def broadcast_first(self, tensor: torch.Tensor, axes: Iterable[str]) -> None:
        """Copy the tensor of the rank at 0 on all ``axes`` to every rank along them."""
        for axis in axes:
            if self._mesh.size(axis) > 1:
                self._mesh.communicator(_joined(axis)).broadcast(tensor, 0).wait()


def _joined(axis: str) -> str:
    # Stages in between hold nothing of a weight that is tied over the ends.
    return _ENDS if axis == "pp" else axis
