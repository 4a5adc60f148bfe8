"""Algorithms without relays: every rank to every other, or all of them through one.

Both combine what the ranks contribute in rank order, rounded once: the bits are those of the
communicator's own collectives, for any order in which messages arrive. ``n`` is the number of
ranks and ``K`` the size of the large tensor.
"""

from __future__ import annotations

import torch

from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import (
    all_gather_by,
    all_reduce_by,
    broadcast_by,
    reduce_by,
    reduce_scatter_by,
)
from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step, check_place
from trainwright.collectives.protocol import ReduceOp


def direct_all_reduce_plan(size: int, rank: int) -> Plan:
    """Return rank's part of an exchange of whole tensors: one step."""
    parts = tuple(Part(peer, 0, 1, Payload.CONTRIBUTION) for peer in _others(size, rank))
    return Plan("direct", rank, size, _once(size, parts, parts), kept=(0, 1), in_rank_order=True)


def direct_reduce_scatter_plan(size: int, rank: int) -> Plan:
    """Return rank's part of an exchange of chunks, each to whoever keeps it: one step."""
    kind = Payload.CONTRIBUTION
    sends = tuple(Part(peer, peer, peer + 1, kind) for peer in _others(size, rank))
    receives = tuple(Part(peer, rank, rank + 1, kind) for peer in _others(size, rank))
    return Plan(
        "direct",
        rank,
        size,
        _once(size, sends, receives),
        blocks=size,
        kept=(rank, rank + 1),
        in_rank_order=True,
    )


def direct_all_gather_plan(size: int, rank: int) -> Plan:
    """Return rank's part of sending its chunk to everybody: one step."""
    kind = Payload.RESULT
    sends = tuple(Part(peer, rank, rank + 1, kind) for peer in _others(size, rank))
    receives = tuple(Part(peer, peer, peer + 1, kind) for peer in _others(size, rank))
    return Plan(
        "direct",
        rank,
        size,
        _once(size, sends, receives),
        blocks=size,
        given=(rank, rank + 1),
        kept=(0, size),
    )


def direct_reduce_plan(size: int, rank: int, root: int) -> Plan:
    """Return rank's part of sending its tensor to ``root``: one step."""
    sends, receives = _star(size, rank, root, Payload.CONTRIBUTION)
    kept = (0, int(rank == root))
    return Plan("direct", rank, size, _once(size, sends, receives), kept=kept, in_rank_order=True)


def direct_broadcast_plan(size: int, rank: int, root: int) -> Plan:
    """Return rank's part of ``root`` sending its tensor to everybody: one step."""
    receives, sends = _star(size, rank, root, Payload.RESULT)
    given = (0, int(rank == root))
    return Plan("direct", rank, size, _once(size, sends, receives), given=given, kept=(0, 1))


def master_worker_all_reduce_plan(size: int, rank: int, master: int = 0) -> Plan:
    """Return rank's part of a reduction by one rank, the master: two steps."""
    sends, receives = _star(size, rank, master, Payload.CONTRIBUTION)
    back, forth = _star(size, rank, master, Payload.RESULT)
    steps = (*_once(size, sends, receives), *_once(size, forth, back))
    return Plan("master_worker", rank, size, steps, kept=(0, 1), in_rank_order=True)


def direct_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place, in rank order; all compute all of it.

    Args and Raises: as `all_reduce_by`.

    Communicates:
        One step of ``n * (n - 1)`` messages; each rank sends ``(n - 1) * K`` in ``n - 1``, in the
        tensor's dtype, and holds as much while it combines.
    """
    plan = direct_all_reduce_plan(comm.size, comm.rank)
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def direct_reduce_scatter(
    comm: Passage,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``input`` over all ranks, in rank order; rank r keeps chunk r of its elements.

    Args and Raises: as `reduce_scatter_by`.

    Communicates:
        One step of ``n * (n - 1)`` messages; each rank sends ``(n - 1) / n * K`` in ``n - 1``, in
        the tensor's dtype.
    """
    plan = direct_reduce_scatter_plan(comm.size, comm.rank)
    reduce_scatter_by(
        plan, comm, output, input, op, reduce_dtype=reduce_dtype, deterministic=deterministic
    )


def direct_all_gather(comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Args and Raises: as `all_gather_by`.

    Communicates:
        One step of ``n * (n - 1)`` messages; each rank sends ``(n - 1) / n * K`` in ``n - 1``.
    """
    all_gather_by(direct_all_gather_plan(comm.size, comm.rank), comm, output, input)


def master_worker_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    master: int = 0,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place, in rank order, on one of them.

    Args and Raises: as `all_reduce_by`; ``master`` is the rank that combines.

    Communicates:
        Two steps of ``n - 1`` messages. Each worker sends and receives ``K``, the master
        ``(n - 1) * K`` each way, all in the tensor's dtype.
    """
    plan = master_worker_all_reduce_plan(comm.size, comm.rank, master)
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def direct_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    root: int,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks into root's, in rank order; the others' are unchanged.

    Args and Raises: as `reduce_by`.

    Communicates:
        One step; every rank but root sends it ``K`` in one message, in the tensor's dtype.
    """
    plan = direct_reduce_plan(comm.size, comm.rank, root)
    reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def direct_broadcast(comm: Passage, tensor: torch.Tensor, root: int) -> None:
    """Copy root's ``tensor`` to every rank, in place.

    Args and Raises: as `broadcast_by`.

    Communicates:
        One step; root sends ``(n - 1) * K`` in ``n - 1`` messages.
    """
    broadcast_by(direct_broadcast_plan(comm.size, comm.rank, root), comm, tensor)


def _others(size: int, rank: int) -> list[int]:
    """Return all other ranks from the next one on, so that they do not all begin with one."""
    check_place("direct", rank, size)
    return [(rank + away) % size for away in range(1, size)]


def _star(
    size: int, rank: int, root: int, payload: Payload
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return what rank sends to ``root`` and what it receives as ``root``."""
    check_place("root", root, size)
    others = _others(size, rank)
    if rank != root:
        return (Part(root, 0, 1, payload),), ()
    return (), tuple(Part(peer, 0, 1, payload) for peer in others)


def _once(size: int, sends: tuple[Part, ...], receives: tuple[Part, ...]) -> tuple[Step, ...]:
    return (Step(sends, receives),) if size > 1 else ()
