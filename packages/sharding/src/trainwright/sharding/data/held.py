"""What a rank holds of the plain model's state: parameters and persistent buffers, each once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import attrs
import torch
from torch import nn

from trainwright.collectives import ShardSpec
from trainwright.sharding.data.agreement import agree
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.mesh import Mesh
from trainwright.sharding.placement import ParameterPlacement, placements_of


@attrs.frozen(eq=False)
class HeldTensor:
    """A rank's part of one tensor of the plain model.

    Args:
        names: All names that the plain model has for it, first the one it goes by.
        positions: Their places in the order of the plain model's ``state_dict``.
        tensor: The elements held here: of a trained parameter the masters.
        spec: Which elements these are.
        dtype: The dtype of the module's own tensor.
    """

    names: tuple[str, ...]
    positions: tuple[int, ...]
    tensor: torch.Tensor
    spec: ShardSpec
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The name it goes by."""
        return self.names[0]

    def counts_on(self, mesh: Mesh) -> bool:
        """Whether no other rank of this pipeline stage comes before this one as its holder."""
        return all(mesh.coordinate(axis) == 0 for axis in self.spec.replicated if axis != "pp")


def agreed_tensors(parallel: DataParallel) -> list[HeldTensor]:
    """Return what `held_tensors` does, or raise on all ranks of the mesh.

    Communicates:
        One all-reduce of 8 bytes over the world.
    """
    held: list[HeldTensor] = []
    problem = None
    try:
        held = held_tensors(parallel)
    except LifecycleError as error:
        problem = str(error)
    agree(parallel.mesh.world, problem, LifecycleError)
    return held


def held_tensors(parallel: DataParallel) -> list[HeldTensor]:
    """Return what this rank holds, in the order of the plain model's ``state_dict``.

    Raises:
        LifecycleError: The model has got a parameter since it was made data-parallel.
    """
    pieces = parallel.pieces
    frozen = parallel.frozen
    cut = {
        part.name
        for group in parallel.layout
        for bucket in group.buckets
        for part in bucket.parameters
    }
    parameters = {id(parameter) for parameter in parallel.module.parameters()}
    placements = placements_of(parallel.module)
    found: list[HeldTensor] = []
    for names, tensor in named_tensors(parallel.module):
        name = next(iter(names))
        piece = pieces.get(name) or frozen.get(name)
        if piece is not None:
            held, spec = piece.parameter.detach(), piece.spec
        elif id(tensor) in parameters and (tensor.numel() > 0 or _lies_elsewhere(name, placements)):
            if tensor.numel() > 0 and name not in cut:
                raise LifecycleError(
                    f"{name} was added or renamed after data_parallel(), so it belongs to no "
                    "state; build the whole module first"
                )
            continue  # all of it is on other ranks
        else:
            held, spec = tensor.detach(), _whole_spec(name, tensor, parallel.mesh)
        found.append(HeldTensor(tuple(names), tuple(names.values()), held, spec, tensor.dtype))
    return found


def named_tensors(module: nn.Module) -> Iterator[tuple[dict[str, int], torch.Tensor]]:
    """Yield each parameter and persistent buffer of a module with all its names.

    The names are in the order of ``state_dict``, each with its place among the names of all.
    """
    # Not module.state_dict(): its hooks may refuse, or copy, what is released at the moment.
    names: dict[int, dict[str, int]] = {}
    tensors: dict[int, torch.Tensor] = {}
    position = 0
    for path, inner in module.named_modules(remove_duplicate=False):
        buffers = {
            key: buffer
            for key, buffer in inner._buffers.items()
            if key not in inner._non_persistent_buffers_set
        }
        for key, tensor in {**inner._parameters, **buffers}.items():
            if tensor is not None:
                tensors[id(tensor)] = tensor
                names.setdefault(id(tensor), {})[f"{path}.{key}" if path else key] = position
                position += 1
    for place, tensor in tensors.items():
        yield names[place], tensor


def _lies_elsewhere(name: str, placements: Mapping[str, ParameterPlacement]) -> bool:
    """Return whether this rank's empty part is of a parameter that has elements."""
    return name in placements and math.prod(placements[name].global_shape) > 0


def _whole_spec(name: str, tensor: torch.Tensor, mesh: Mesh) -> ShardSpec:
    axes = [axis for axis in ("dp", "cp", "tp") if mesh.size(axis) > 1]
    return ShardSpec.full(name, tensor.shape, axes)
