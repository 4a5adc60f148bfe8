"""The way from and to the device meshes of torch.distributed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainwright.collectives import Communicator, TorchCommunicator
from trainwright.sharding.errors import ShardingError
from trainwright.sharding.mesh.axes import DENSE_AXES, unknown_axis
from trainwright.sharding.mesh.order import complete_order, split_dp
from trainwright.sharding.mesh.shape import MeshShape

_PARTS = ("dp_replicate", "dp_shard")
_NAMES = (*DENSE_AXES, *_PARTS)


def join_device_mesh(
    device_mesh: DeviceMesh,
    axes: Sequence[str] | None,
    ep: int,
    etp: int | None,
    world: Communicator | None,
) -> tuple[MeshShape, Communicator]:
    """Return the shape of a device mesh, and a world in which each rank stands at its place.

    See `Mesh.from_device_mesh`.
    """
    names = _names_of(device_mesh, axes)
    ranks = device_mesh.mesh
    found = plain_order(ranks, names)
    row_by_row = [axis for axis, size in zip(names, ranks.shape, strict=True) if size > 1]
    order = complete_order(row_by_row if found is None else found)
    shape = _shape_of(dict(zip(names, ranks.shape, strict=True)), ep, etp, order)
    members: list[int] = ranks.flatten().tolist()
    here = device_mesh.get_rank()
    if found is not None:
        members.sort()
    if world is not None:
        _check_world(world, members, here)
        return shape, world
    base = TorchCommunicator(device=device_mesh.device_type)
    if members == list(range(base.size)):
        return shape, base
    is_member = here in members
    part = base.split(
        color=min(members) if is_member else None, key=members.index(here) if is_member else 0
    )
    if part is None:
        raise ShardingError(
            f"rank {here} is not in the device mesh of ranks {_few(members)}, which have theirs "
            "now; pass the device mesh that this rank is in, or go on without a mesh"
        )
    return shape, part


def make_device_mesh(
    world: Communicator, shape: MeshShape, axes: Sequence[str], device_type: str | None
) -> DeviceMesh:
    """Return the device mesh of a world with a shape; see `Mesh.to_device_mesh`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ShardingError(
            "a device mesh needs torch's default process group and there is none; call "
            "torch.distributed.init_process_group() first"
        )
    if world.size != dist.get_world_size():
        raise ShardingError(
            f"the mesh has {world.size} of the {dist.get_world_size()} ranks of the default "
            "process group; make the device mesh of all of them and slice it, as in "
            "mesh.to_device_mesh()['dp', 'tp']"
        )
    named = _dims_of(shape, axes)
    here = torch.tensor([dist.get_rank()], device=world.device)
    members = here.new_empty(world.size)
    world.all_gather(members, here).wait()
    members = members.cpu()
    if len(set(members.tolist())) < world.size:
        raise ShardingError("ranks of a device mesh are processes, but some of these share one")
    written = shape.ordered(named)
    grid = torch.tensor(shape.ranks(0, *written)).view([shape.size(axis) for axis in written])
    grid = grid.permute([written.index(axis) for axis in named])
    return DeviceMesh(device_type or world.device.type, members[grid], mesh_dim_names=named)


def plain_order(ranks: torch.Tensor, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return in which order axes of more than one rank run through increasing ranks.

    Args:
        ranks: The rank at each place, a dim an axis.
        names: The axis of each dim.

    Returns:
        Outermost first; None where no order has these ranks at these places.
    """
    places = ranks.flatten().argsort().argsort().view(ranks.shape)
    wide = [dim for dim, size in enumerate(ranks.shape) if size > 1]
    steps = {dim: int(places.select(dim, 1).flatten()[0]) for dim in wide}
    dims = sorted(range(ranks.ndim), key=lambda dim: -steps.get(dim, 0))
    if not torch.equal(places.permute(dims).flatten(), torch.arange(ranks.numel())):
        return None
    return tuple(names[dim] for dim in dims if dim in steps)


def _names_of(device_mesh: DeviceMesh, axes: Sequence[str] | None) -> tuple[str, ...]:
    sizes = tuple(device_mesh.mesh.shape)
    named = device_mesh.mesh_dim_names if axes is None else tuple(axes)
    if named is None:
        raise ShardingError(
            f"the device mesh of sizes {sizes} has no names for its dims; pass axes=(...) with one "
            f"of {', '.join(_NAMES)} for each"
        )
    if len(named) != len(sizes):
        raise ShardingError(
            f"axes {named} must name each of the {len(sizes)} dims of the device mesh of sizes "
            f"{sizes}; it names {len(named)}"
        )
    for axis in named:
        if axis not in _NAMES:
            raise ShardingError(
                f"dim {named.index(axis)} of the device mesh: {unknown_axis(axis, _NAMES)}; "
                "pass axes=(...) to name the dims anew"
            )
    if len(set(named)) < len(named) or ("dp" in named and set(_PARTS) & set(named)):
        raise ShardingError(
            f"dims {', '.join(named)} of the device mesh name an axis twice (dp is dp_replicate "
            "and dp_shard); pass axes=(...) to name them anew"
        )
    return named


def _shape_of(sizes: dict[str, int], ep: int, etp: int | None, order: tuple[str, ...]) -> MeshShape:
    is_split = bool(set(_PARTS) & set(sizes))
    dp_shard = sizes.get("dp_shard", 1)
    return MeshShape(
        pp=sizes.get("pp", 1),
        cp=sizes.get("cp", 1),
        tp=sizes.get("tp", 1),
        dp=sizes.get("dp_replicate", 1) * dp_shard if is_split else sizes.get("dp", 1),
        ep=ep,
        etp=etp,
        dp_shard=dp_shard if is_split else None,
        order=order,
    )


def _check_world(world: Communicator, members: list[int], here: int) -> None:
    place = members.index(here) if here in members else None
    if (world.size, world.rank) != (len(members), place):
        where = "not in it" if place is None else f"place {place} of {len(members)}"
        raise ShardingError(
            f"rank {here} is {world.rank} of {world.size} in world but {where} in the device mesh "
            f"of ranks {_few(members)}; pass a communicator of these ranks in this order"
        )


def _dims_of(shape: MeshShape, axes: Sequence[str]) -> tuple[str, ...]:
    order = shape.order if shape.dp_shard is None else split_dp(shape.order)
    wide = tuple(axis for axis in order if shape.size(axis) > 1) or ("dp",)
    named = tuple(axes) or wide
    if len(set(named)) < len(named):
        raise ShardingError(f"dims {', '.join(named)} name an axis twice; name each once")
    if shape.size(*named) != shape.world_size:
        raise ShardingError(
            f"dims {', '.join(named)} join {shape.size(*named)} of {shape.world_size} ranks; name "
            f"all of {', '.join(wide)}, and slice the device mesh, as in device_mesh[{named[0]!r}]"
        )
    return named


def _few(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, …"
