"""Reductions and broadcasts through one binary tree: few steps, for small tensors.

Contributions are combined on the way up and results copied on the way down. The tensor is cut into
``k`` chunks that follow each other, up and down at the same time. ``n`` is the number of ranks,
``K`` the size of the tensor and ``h = floor(log2 n)`` the height of the tree. Inner ranks send the
tensor three times; a double tree shares that between all.

Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH
(International Journal of High Performance Computing Applications, 2005); the shape is that of
`trees`.
"""

from __future__ import annotations

import torch

from trainwright.collectives.algorithms.climb import Climb, chunks_of
from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import all_reduce_by, broadcast_by, reduce_by
from trainwright.collectives.algorithms.plan import Plan
from trainwright.collectives.algorithms.trees import node_below, tree_height, tree_node
from trainwright.collectives.protocol import ReduceOp


def tree_all_reduce_plan(size: int, rank: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a tree: ``2 * h + k - 1`` steps for ``k = num_chunks``."""
    climb = Climb(tree_height(size), lambda other: tree_node(size, other), 0, num_chunks)
    steps = tuple(climb.up_and_down(rank))
    return Plan("tree", rank, size, steps, pieces=num_chunks, kept=(0, num_chunks))


def tree_reduce_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a reduction to ``root``: ``h + k - 1`` steps."""
    climb = Climb(tree_height(size), lambda other: node_below(size, other, root), 0, num_chunks)
    kept = (0, num_chunks if rank == root else 0)
    return Plan("tree", rank, size, tuple(climb.up(rank)), pieces=num_chunks, kept=kept)


def tree_broadcast_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a broadcast from ``root``: ``h + k - 1`` steps."""
    climb = Climb(tree_height(size), lambda other: node_below(size, other, root), 0, num_chunks)
    return Plan(
        "tree",
        rank,
        size,
        tuple(climb.down(rank)),
        pieces=num_chunks,
        given=(0, num_chunks if rank == root else 0),
        kept=(0, num_chunks),
    )


def tree_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    num_chunks: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place, through one binary tree.

    Args and Raises: as `all_reduce_by`. ``num_chunks`` is k, the same on all ranks; None: a chunk
    for each MiB.

    Communicates:
        ``2 * h + k - 1`` steps. A rank sends its parent and each child ``k`` messages: ``K`` for
        each of them, up in ``reduce_dtype`` (leaves: the tensor's), down in the tensor's dtype.
        Together that is ``2 * (n - 1) * K`` in ``2 * (n - 1) * k`` messages.
    """
    plan = tree_all_reduce_plan(comm.size, comm.rank, chunks_of("tree", tensor, num_chunks))
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def tree_reduce(
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

    Args and Raises: as `reduce_by`; ``num_chunks`` as in `tree_all_reduce`.

    Communicates:
        ``h + k - 1`` steps; every rank but root sends its parent ``K`` in ``k`` messages.
    """
    plan = tree_reduce_plan(comm.size, comm.rank, root, chunks_of("tree", tensor, num_chunks))
    reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def tree_broadcast(
    comm: Passage, tensor: torch.Tensor, root: int, *, num_chunks: int | None = None
) -> None:
    """Copy root's ``tensor`` to every rank, in place, through one binary tree.

    Args and Raises: as `broadcast_by`; ``num_chunks`` as in `tree_all_reduce`.

    Communicates:
        ``h + k - 1`` steps; every rank sends each of its children ``K`` in ``k`` messages.
    """
    plan = tree_broadcast_plan(comm.size, comm.rank, root, chunks_of("tree", tensor, num_chunks))
    broadcast_by(plan, comm, tensor)
