"""The ranks of a process group or mesh, as those need them who make communicators of them."""

from __future__ import annotations

import contextlib
from typing import cast

import attrs
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from trainwright.collectives.errors import UsageError


@attrs.frozen
class Members:
    """A process group and its ranks in the world, in order."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]


def resolve_members(who: str, group: dist.ProcessGroup | DeviceMesh | None) -> Members:
    """Return the ranks that a user means.

    Args:
        who: the communicator that is being made, for messages.
        group: a process group, a one-dimensional device mesh, or None for the default group.

    Raises:
        UsageError: the process is not a member, or the mesh has several dimensions.
    """
    if not dist.is_initialized():
        raise UsageError(
            f"{who}: torch.distributed is not initialized; call init_process_group "
            "first, or use SingleCommunicator for one process"
        )
    if isinstance(group, DeviceMesh):
        return _resolve_mesh(who, group)
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(_describe_stranger(who, group))
    ranks = tuple(int(rank) for rank in dist.get_process_group_ranks(group))
    return Members(group, ranks)


def group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return how long the operations of a group wait for peers."""
    options = group._get_backend(device).options
    timeout = getattr(options, "_timeout", default_pg_timeout)
    return float(timeout.total_seconds())


def _resolve_mesh(who: str, mesh: DeviceMesh) -> Members:
    if mesh.ndim != 1:
        names: tuple[str | int, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise UsageError(
            f"{who}: the mesh has {mesh.ndim} dimensions {names}; pass one of them, "
            f"such as mesh.get_group({names[0]!r})"
        )
    ranks = tuple(int(rank) for rank in mesh.mesh.tolist())
    if mesh.get_coordinate() is None:
        raise UsageError(
            f"{who}: global rank {dist.get_rank()} is not a member of the mesh with "
            f"the global ranks {list(ranks)}"
        )
    return Members(mesh.get_group(), ranks)


def _describe_stranger(who: str, group: object) -> str:
    text = f"{who}: expected a ProcessGroup or DeviceMesh, got {group!r}"
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        text = (
            f"{who}: global rank {dist.get_rank()} is not a member of this group; "
            "make the communicator on members only, or use split(), which gives None to the others"
        )
        # torch keeps the members of the last such group only.
        with contextlib.suppress(Exception):
            ranks = dist.get_process_group_ranks(cast(dist.ProcessGroup, group))
            text += f". The last group made without this rank has the members {ranks}"
    return text
