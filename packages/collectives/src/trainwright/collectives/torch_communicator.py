"""A communicator over the process groups and meshes of torch.distributed."""

from __future__ import annotations

import contextlib
from typing import cast

import attrs
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from trainwright.collectives.arithmetic import normalize_device
from trainwright.collectives.calls import Backend
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.errors import UsageError
from trainwright.collectives.failures import FailureBoard
from trainwright.collectives.gloo_backend import GlooBackend
from trainwright.collectives.native_backend import NativeBackend
from trainwright.collectives.rendezvous import nest

_PREFIX = "trainwright.collectives"
_GLOO_ON_CUDA = ("cuda", "gloo")


class TorchCommunicator(CheckedCommunicator):
    """The ranks of a process group, in its order.

    On CPU with Gloo it makes connections of its own, so that its messages cannot meet those of
    other users of the group; sums are in rank order, in float32 at least, and the same bits on
    every rank. Ranks that call different operations wait for each other until the timeout. With
    other backends it calls the operations of the group itself, which add in an order of their own
    unless ``deterministic`` is set.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the default group.
        device: where tensors must live; None takes what the group is made for.
        deterministic: whether reductions are in rank order with every backend: contributions are
            exchanged by messages and then combined, the same bits as on all other communicators.
            Gloo on CPU does that in any case. NCCL's own operations are faster.

    Raises:
        UsageError: the process is not a member, or the mesh has several dimensions.

    Communicates:
        All ranks of the group construct together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        deterministic: bool = False,
    ) -> None:
        members = _resolve_group(group)
        place = _resolve_device(members.group, device)
        super().__init__(_make_backend(members, place, deterministic))


@attrs.frozen
class _Members:
    group: dist.ProcessGroup
    ranks: tuple[int, ...]


def _make_backend(members: _Members, device: torch.device, deterministic: bool) -> Backend:
    group = members.group
    world_rank = dist.get_rank()
    rank = members.ranks.index(world_rank)
    name = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    # Every rank makes its n-th communicator of a group together with the others' n-th.
    root = nest(group.get_group_store(), f"{_PREFIX}/{group.group_name}")
    store = nest(root, str(root.add(f"count/{rank}", 1)))
    board = FailureBoard(store, world_rank)
    if device.type == "cpu" and _backends(group)["cpu"] == "gloo":
        return GlooBackend(store, rank, members.ranks, name, _timeout_s(group, device), board)
    return NativeBackend(group, device, members.ranks, name, board, deterministic)


def _resolve_device(group: dist.ProcessGroup, device: torch.device | str | None) -> torch.device:
    # Gloo claims CUDA too, by way of the CPU.
    offered = [kind for kind, name in _backends(group).items() if (kind, name) != _GLOO_ON_CUDA]
    if device is None:
        is_first = "cuda" in offered and torch.cuda.is_available()
        device = "cuda" if is_first or "cpu" not in offered else "cpu"
    place = normalize_device(device)
    if place.type not in offered:
        raise UsageError(
            f"TorchCommunicator: the group has no backend for {place.type}, only for {offered}; "
            "pass one of them as device, or make the group with another backend"
        )
    return place


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return dict(pairs)


def _timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    options = group._get_backend(device).options
    timeout = getattr(options, "_timeout", default_pg_timeout)
    return float(timeout.total_seconds())


def _resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> _Members:
    if not dist.is_initialized():
        raise UsageError(
            "TorchCommunicator: torch.distributed is not initialized; call init_process_group "
            "first, or use SingleCommunicator for one process"
        )
    if isinstance(group, DeviceMesh):
        return _resolve_mesh(group)
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(_describe_stranger(group))
    ranks = tuple(int(rank) for rank in dist.get_process_group_ranks(group))
    return _Members(group, ranks)


def _resolve_mesh(mesh: DeviceMesh) -> _Members:
    if mesh.ndim != 1:
        names: tuple[str | int, ...] = mesh.mesh_dim_names or tuple(range(mesh.ndim))
        raise UsageError(
            f"TorchCommunicator: the mesh has {mesh.ndim} dimensions {names}; pass one of them, "
            f"such as mesh.get_group({names[0]!r})"
        )
    ranks = tuple(int(rank) for rank in mesh.mesh.tolist())
    if mesh.get_coordinate() is None:
        raise UsageError(
            f"TorchCommunicator: global rank {dist.get_rank()} is not a member of the mesh with "
            f"the global ranks {list(ranks)}"
        )
    return _Members(mesh.get_group(), ranks)


def _describe_stranger(group: object) -> str:
    text = f"TorchCommunicator: expected a ProcessGroup or DeviceMesh, got {group!r}"
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        text = (
            f"TorchCommunicator: global rank {dist.get_rank()} is not a member of this group; "
            "make the communicator on members only, or use split(), which gives None to the others"
        )
        # torch keeps the members of the last such group only.
        with contextlib.suppress(Exception):
            ranks = dist.get_process_group_ranks(cast(dist.ProcessGroup, group))
            text += f". The last group made without this rank has the members {ranks}"
    return text
