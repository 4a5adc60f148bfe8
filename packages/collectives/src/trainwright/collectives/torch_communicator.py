"""A communicator over the process groups and meshes of torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainwright.collectives.arithmetic import normalize_device
from trainwright.collectives.calls import Backend
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.errors import UsageError
from trainwright.collectives.failures import FailureBoard
from trainwright.collectives.gloo_backend import GlooBackend
from trainwright.collectives.members import Members, group_timeout_s, resolve_members
from trainwright.collectives.native_backend import NativeBackend
from trainwright.collectives.rendezvous import nest

_PREFIX = "trainwright.collectives"
_GLOO_ON_CUDA = ("cuda", "gloo")


class TorchCommunicator(CheckedCommunicator):
    """The ranks of a process group, in its order.

    On CPU with Gloo it makes connections of its own, so that its messages cannot meet those of
    other users of the group; sums are in rank order, in float32 at least, and the same bits on
    every rank. Where ranks call different collectives, and so wait for each other, all of them get
    a `UsageError` within about five seconds that tells who called what; the communicator and all
    that are split from it are of no use then. Messages, and parts of an all-to-all, that differ
    between their ends wait until the timeout. With other backends it calls the operations of the
    group itself, which add in an order of their own unless ``deterministic`` is set.

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
        members = resolve_members("TorchCommunicator", group)
        place = _resolve_device(members.group, device)
        super().__init__(_make_backend(members, place, deterministic))


def _make_backend(members: Members, device: torch.device, deterministic: bool) -> Backend:
    group = members.group
    world_rank = dist.get_rank()
    rank = members.ranks.index(world_rank)
    name = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    # Every rank makes its n-th communicator of a group together with the others' n-th.
    root = nest(group.get_group_store(), f"{_PREFIX}/{group.group_name}")
    store = nest(root, str(root.add(f"count/{rank}", 1)))
    board = FailureBoard(store, world_rank)
    if device.type == "cpu" and _backends(group)["cpu"] == "gloo":
        return GlooBackend(store, rank, members.ranks, name, group_timeout_s(group, device), board)
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
