"""A model's state as torch's DTensors, cut by rows over the data ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainwright.sharding.data.agreement import agree
from trainwright.sharding.data.held import HeldTensor, held_tensors, named_tensors
from trainwright.sharding.data.lifecycle import DataParallel
from trainwright.sharding.data.rows import (
    COPY_AXES,
    DATA,
    RowPlan,
    axis_place,
    axis_size,
    gather_specs,
    move_rows,
)
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh import Mesh

_NAMES = ("dp", "dp_replicate", "dp_shard", "cp", "tp")


def dtensor_state_dict(
    parallel: DataParallel, device_mesh: DeviceMesh | None = None
) -> dict[str, torch.Tensor]:
    """Return the plain model's ``state_dict`` with parameters as DTensors; all ranks call it.

    Args:
        parallel: The model, between two steps. The process has a default process group.
        device_mesh: Over the ranks of this pipeline stage. Its dims are named after axes of the
            mesh: dp (or dp_replicate and dp_shard), cp, tp; a mesh of one dim with another name or
            none joins all dp and cp ranks. None makes one, with process groups of its own, at
            every call.

    Returns:
        Copies, under all of the plain model's names that this pipeline stage has. A parameter has
        the masters' values in the module's dtype and is ``Shard(0)`` on dp, dp_shard and cp, as
        `torch.chunk` cuts (later ranks may have fewer rows or none), ``Shard`` on tp in the dim in
        which it is cut there, else ``Replicate``; a parameter without dims is replicated. Buffers
        are plain tensors.

    Raises:
        ShardingError: On all ranks of the stage: there is no process group, or a dim of
            ``device_mesh`` does not fit the mesh.

    Communicates:
        What each rank holds, then for each parameter messages with the rows that lie elsewhere,
        among the ranks that share one copy of the states.
    """
    mesh = parallel.mesh
    if not (dist.is_available() and dist.is_initialized()):
        raise ShardingError(
            "DTensors need torch's default process group and there is none; call "
            "torch.distributed.init_process_group(), or use piece_state_dict or full_state_dict"
        )
    group = mesh.communicator(*COPY_AXES)
    if device_mesh is None:
        agree(group, _check_world(mesh))
        device_mesh = _make_device_mesh(mesh)
    axes = _axes_of(device_mesh)
    agree(group, _check_device_mesh(device_mesh, axes, mesh))
    held = {item.name: item for item in held_tensors(parallel)}
    parameters = {id(parameter) for parameter in parallel.module.parameters()}
    specs = gather_specs(mesh, held)
    found: dict[str, tuple[int, torch.Tensor]] = {}
    for names, tensor in named_tensors(parallel.module):
        name = next(iter(names))
        if id(tensor) in parameters:
            plan = RowPlan.of(name, tensor.dtype, specs[name], axes, mesh)
            value = _as_dtensor(plan, held.get(name), device_mesh)
        else:
            value = tensor.detach().clone()
        found |= {alias: (place, value) for alias, place in names.items()}
    return {name: found[name][1] for name in sorted(found, key=lambda name: found[name][0])}


def _as_dtensor(plan: RowPlan, held: HeldTensor | None, device_mesh: DeviceMesh) -> torch.Tensor:
    # Here, as importing it takes as long as importing half of torch.
    from torch.distributed.tensor import DTensor, Replicate, Shard

    return DTensor.from_local(
        move_rows(plan, held),
        device_mesh,
        [Replicate() if dim is None else Shard(dim) for dim in plan.cuts],
        run_check=False,
        shape=torch.Size(plan.shape),
        stride=_contiguous_stride(plan.shape),
    )


def _axes_of(device_mesh: DeviceMesh) -> tuple[str, ...]:
    names = device_mesh.mesh_dim_names or ("",) * device_mesh.ndim
    if len(names) == 1 and names[0] not in _NAMES:
        return (DATA,)
    return tuple(names)


def _check_world(mesh: Mesh) -> str | None:
    if (dist.get_rank(), dist.get_world_size()) == (mesh.rank, mesh.world.size):
        return None
    return (
        f"rank {mesh.rank} of the mesh's {mesh.world.size} is rank {dist.get_rank()} of the "
        f"default process group's {dist.get_world_size()}; pass a device_mesh of the mesh's ranks"
    )


def _check_device_mesh(device_mesh: DeviceMesh, axes: Sequence[str], mesh: Mesh) -> str | None:
    if device_mesh.device_type != mesh.world.device.type:
        return (
            f"device_mesh is of {device_mesh.device_type}, the model's states are on "
            f"{mesh.world.device.type}"
        )
    if mesh.size("tp") > 1 and "tp" not in axes:
        return f"device_mesh needs a dim named 'tp', as the mesh has tp={mesh.size('tp')}"
    if "dp" in axes and {"dp_replicate", "dp_shard"} & set(axes):
        return f"device_mesh has the dims {', '.join(axes)}; dp is dp_replicate and dp_shard"
    for dim, axis in enumerate(axes):
        if axis not in (*_NAMES, DATA):
            return f"device_mesh has a dim named {axis!r}; name dims {', '.join(_NAMES)}"
        seen = device_mesh.size(dim), device_mesh.get_local_rank(dim)
        wanted = axis_size(mesh, axis), axis_place(mesh, mesh.rank, axis)
        if seen != wanted:
            what = "dp and cp together" if axis == DATA else axis
            return (
                f"on {what} rank {mesh.rank} is {wanted[1]} of {wanted[0]} in the mesh but "
                f"{seen[1]} of {seen[0]} in device_mesh"
            )
    return None


def _make_device_mesh(mesh: Mesh) -> DeviceMesh:
    data = ("dp",) if mesh.shape.dp_shard is None else ("dp_replicate", "dp_shard")
    axes = (*data, *(axis for axis in ("cp", "tp") if mesh.size(axis) > 1))
    return mesh.to_device_mesh("pp", *axes)[axes]


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
