"""Broadcasts and reductions along a ring: every rank sends the tensor once, whoever is the root.

The ranks from the root on stand in a chain. The tensor is cut into ``k`` chunks that follow each
other along it; ``n`` is the number of ranks and ``K`` the size of the tensor.

Source: Barnett, Littlefield, Payne, van de Geijn: Global combine on mesh architectures with
wormhole routing (International Parallel Processing Symposium, 1993).
"""

from __future__ import annotations

import torch

from trainwright.collectives.algorithms.climb import Climb, chunks_of
from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import broadcast_by, reduce_by
from trainwright.collectives.algorithms.plan import Plan, check_place
from trainwright.collectives.algorithms.trees import TreeNode
from trainwright.collectives.protocol import ReduceOp


def ring_reduce_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a reduction to ``root``: ``n + k - 2`` steps."""
    steps = tuple(_chain(size, root, num_chunks).up(rank))
    kept = (0, num_chunks if rank == root else 0)
    return Plan("ring", rank, size, steps, pieces=num_chunks, kept=kept)


def ring_broadcast_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a broadcast from ``root``: ``n + k - 2`` steps."""
    steps = tuple(_chain(size, root, num_chunks).down(rank))
    given = (0, num_chunks if rank == root else 0)
    return Plan("ring", rank, size, steps, pieces=num_chunks, given=given, kept=(0, num_chunks))


def ring_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    root: int,
    op: ReduceOp = ReduceOp.SUM,
    *,
    num_chunks: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks into root's ``tensor``; the others' are unchanged.

    Args and Raises: as `reduce_by`. ``num_chunks`` is k, the same on all ranks; None: a chunk for
    each MiB.

    Communicates:
        ``n + k - 2`` steps; every rank but root sends ``K`` in ``k`` messages to the rank before
        it.
    """
    chunks = chunks_of("ring", tensor, num_chunks)
    plan = ring_reduce_plan(comm.size, comm.rank, root, chunks)
    reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def ring_broadcast(
    comm: Passage, tensor: torch.Tensor, root: int, *, num_chunks: int | None = None
) -> None:
    """Copy root's ``tensor`` to every rank, in place, from each rank to the next one.

    Args and Raises: as `broadcast_by`; ``num_chunks`` as in `ring_reduce`.

    Communicates:
        ``n + k - 2`` steps; every rank but the last sends ``K`` in ``k`` messages.
    """
    chunks = chunks_of("ring", tensor, num_chunks)
    broadcast_by(ring_broadcast_plan(comm.size, comm.rank, root, chunks), comm, tensor)


def _chain(size: int, root: int, num_chunks: int) -> Climb:
    check_place("ring: root", root, size)

    def node(rank: int) -> TreeNode:
        check_place("ring", rank, size)
        place = (rank - root) % size
        following = () if place == size - 1 else ((rank + 1) % size,)
        return TreeNode((rank - 1) % size if place else None, following, place)

    return Climb(size - 1, node, 0, num_chunks)
