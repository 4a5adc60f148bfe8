"""A communicator of the processes of one host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.checks import check_color, check_timeout
from trainwright.collectives.errors import UsageError
from trainwright.collectives.members import group_timeout_s, resolve_members
from trainwright.collectives.rendezvous import Store, nest
from trainwright.collectives.shm.group import ShmBackend, connect

_PREFIX = "trainwright.collectives/shm"


class SharedMemoryCommunicator(CheckedCommunicator):
    """The processes of one host, through memory that all of them see; for tensors on CPU.

    Sums are in rank order, in float32 at least: the bits of `LocalWorld`. Tensors made by `empty`
    live in shared memory: peers read and write them directly. Others are copied through it. Only a
    waiting rank works, at its peers' operations too; where it computes instead, a thread takes its
    place after some milliseconds. A process that dies is noticed within some hundredths of a
    second; the memory has no name and goes with its last user.

    A send has ended for its sender when it is copied; one from shared memory, or more than 64 MiB
    that the receiver has not taken, when it has been read.

    Args:
        group: a process group, a one-dimensional device mesh, or None for the default group; only
            its ranks and its store are used.
        timeout_s: how long operations wait for peers; None takes the group's timeout.

    Raises:
        UsageError: the process is not a member, or the mesh has several dimensions.
        NotAvailableError: this is not Linux on x86-64 or aarch64, or the ranks do not share a
            host, a user and a view of its processes.
        CollectiveTimeoutError: not all ranks came.

    Communicates:
        All ranks of the group construct together. Of n ranks, K being the bytes of the large
        tensor, each reads K(n-1)/n in its peers' memory; in an all-reduce it writes as much there,
        or reads as much again where tensors of more than two ranks do not live in shared memory.
        What does not live there is copied once more on its way, each way. An all-reduce of up to
        256 KiB and 1 MiB/n is computed by one of more than two ranks, which reads K(n-1); the
        others read K.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        check_timeout("SharedMemoryCommunicator", timeout_s)
        members = resolve_members("SharedMemoryCommunicator", group)
        rank = members.ranks.index(dist.get_rank())
        root = nest(members.group.get_group_store(), f"{_PREFIX}/{members.group.group_name}")
        # Every rank makes its n-th communicator of a group together with the others' n-th.
        store = nest(root, str(root.add(f"count/{rank}", 1)))
        limit_s = timeout_s or group_timeout_s(members.group, torch.device("cpu"))
        name = members.group.group_desc
        if name in ("", "undefined"):
            name = members.group.group_name
        self._shared = connect(store, rank, members.ranks, limit_s, name)
        super().__init__(self._shared)

    @classmethod
    def from_store(
        cls, store: Store, rank: int, size: int, *, timeout_s: float = 300.0, name: str = "shm"
    ) -> SharedMemoryCommunicator:
        """Return the communicator of the ``size`` processes that meet in a store.

        Args:
            store: one of torch.distributed, or a part of one, that nobody else uses.
            rank: this process, from 0.
            size: the number of processes.
            timeout_s: how long operations wait for peers.
            name: for messages.

        Raises:
            UsageError: ``rank`` is not one of ``size``, or the timeout is not positive.
            NotAvailableError: as in the constructor.
            CollectiveTimeoutError: not all ranks came.
        """
        check_timeout("SharedMemoryCommunicator", timeout_s)
        if not 0 <= rank < size:
            raise UsageError(
                f"SharedMemoryCommunicator: rank={rank} must be one of 0..{size - 1} (size={size})"
            )
        return cls._of(connect(store, rank, range(size), timeout_s, name))

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a contiguous tensor without values that lives in shared memory.

        Every communicator split from the same one knows it. Collectives read and write it where it
        is; so do its views. Its memory is used again once nothing refers to it any more.

        Args:
            shape: lengths of the dims.
            dtype: of the elements.

        Raises:
            UsageError: a length is negative.
            CollectiveError: there is no room.
        """
        lengths = tuple(int(length) for length in shape)
        if any(length < 0 for length in lengths):
            raise UsageError(f"empty: shape={list(lengths)} has a negative length")
        return self._shared.domain.arena.tensor(lengths, dtype)

    def split(self, color: int | None, key: int = 0) -> SharedMemoryCommunicator | None:
        """See `Communicator.split`; one all-gather, no new connections."""
        self._refuse_inside_coalesce("split")
        check_color(color, key)
        backend = self._shared.split(color, key)
        return None if backend is None else self._of(backend)

    @classmethod
    def _of(cls, backend: ShmBackend) -> SharedMemoryCommunicator:
        made = cls.__new__(cls)
        made._shared = backend
        CheckedCommunicator.__init__(made, backend)
        return made
