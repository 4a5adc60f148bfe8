"""Reductions and broadcasts through two binary trees at once: few steps and no surplus traffic.

Each of the trees carries half of the tensor, and the inner ranks of one are the leaves of the
other: no rank sends more than ``2 * K`` in an all-reduce, however many ranks there are. It sends at
most four messages in a step: one up and two down in the tree where it is an inner rank, and one up
in the other. Each half is cut into ``k`` chunks that follow each other, up and down at the same
time. ``n`` is the number of ranks, ``K`` the size of the tensor and ``h = floor(log2 n)`` the
height of a tree.

For broadcasts and reductions the root stands above two trees of all others.

Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan
(Parallel Computing, 2009), which lets a rank send and receive one message a step and so counts up
to four steps where this counts one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainwright.collectives.algorithms.climb import Climb, chunks_of
from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import all_reduce_by, broadcast_by, reduce_by
from trainwright.collectives.algorithms.plan import Plan, check_place, side_by_side
from trainwright.collectives.algorithms.trees import (
    TreeNode,
    renamed,
    tree_height,
    tree_node,
    tree_root,
    twin_node,
    twin_root,
)
from trainwright.collectives.protocol import ReduceOp

_NAME = "double_tree"


def double_tree_all_reduce_plan(size: int, rank: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of two trees: ``2 * h + k - 1`` steps for k chunks in each."""
    first = Climb(tree_height(size), lambda other: tree_node(size, other), 0, num_chunks)
    second = Climb(tree_height(size), lambda other: twin_node(size, other), num_chunks, num_chunks)
    steps = side_by_side(first.up_and_down(rank), second.up_and_down(rank))
    kept = (0, 2 * num_chunks)
    return Plan("double_tree", rank, size, steps, blocks=2, pieces=num_chunks, kept=kept)


def double_tree_reduce_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a reduction to ``root``: ``floor(log2(n - 1)) + k`` steps."""
    steps = side_by_side(*(climb.up(rank) for climb in _below(size, root, num_chunks)))
    kept = (0, 2 * num_chunks if rank == root else 0)
    return Plan(_NAME, rank, size, steps, blocks=2, pieces=num_chunks, kept=kept)


def double_tree_broadcast_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a broadcast from ``root``: ``floor(log2(n - 1)) + k`` steps."""
    return Plan(
        _NAME,
        rank,
        size,
        side_by_side(*(climb.down(rank) for climb in _below(size, root, num_chunks))),
        blocks=2,
        pieces=num_chunks,
        given=(0, 2 * num_chunks if rank == root else 0),
        kept=(0, 2 * num_chunks),
    )


def double_tree_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    num_chunks: int | None = None,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place, half of it through each of two binary trees.

    Args and Raises: as `all_reduce_by`. ``num_chunks`` is k, the chunks of each half, the same on
    all ranks; None: a chunk for each MiB.

    Communicates:
        ``2 * h + k - 1`` steps. A rank sends ``K / 2`` for each neighbour in each tree, in ``k``
        messages: at most ``2 * K`` in ``4 * k``. Together that is ``2 * (n - 1) * K``.
    """
    chunks = chunks_of("double_tree", tensor, num_chunks, 2)
    plan = double_tree_all_reduce_plan(comm.size, comm.rank, chunks)
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def double_tree_reduce(
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

    Args and Raises: as `reduce_by`; ``num_chunks`` as in `double_tree_all_reduce`.

    Communicates:
        ``floor(log2(n - 1)) + k`` steps; every rank but root sends ``K`` in ``2 * k`` messages and
        receives at most as much.
    """
    chunks = chunks_of(_NAME, tensor, num_chunks, 2)
    plan = double_tree_reduce_plan(comm.size, comm.rank, root, chunks)
    reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def double_tree_broadcast(
    comm: Passage, tensor: torch.Tensor, root: int, *, num_chunks: int | None = None
) -> None:
    """Copy root's ``tensor`` to every rank, in place, half of it through each of two trees.

    Args and Raises: as `broadcast_by`; ``num_chunks`` as in `double_tree_all_reduce`.

    Communicates:
        ``floor(log2(n - 1)) + k`` steps; every rank but root receives ``K`` in ``2 * k`` messages
        and no rank sends more.
    """
    chunks = chunks_of(_NAME, tensor, num_chunks, 2)
    broadcast_by(double_tree_broadcast_plan(comm.size, comm.rank, root, chunks), comm, tensor)


def _below(size: int, root: int, num_chunks: int) -> tuple[Climb, Climb]:
    """Return the ways of both halves in two trees of all ranks but ``root``, which is on top."""
    check_place(f"{_NAME}: root", root, size)
    if size == 1:
        alone = Climb(0, lambda rank: tree_node(1, rank), 0, num_chunks)
        return alone, alone
    height = tree_height(size - 1) + 1

    def placed(place: Callable[[int, int], TreeNode], top: int) -> Callable[[int], TreeNode]:
        return lambda rank: _node_below(place, top, size, rank, root)

    return (
        Climb(height, placed(tree_node, tree_root(size - 1)), 0, num_chunks),
        Climb(height, placed(twin_node, twin_root(size - 1)), num_chunks, num_chunks),
    )


def _node_below(
    place: Callable[[int, int], TreeNode], top: int, size: int, rank: int, root: int
) -> TreeNode:
    """Return rank's place below ``root``, under which is what has the number ``top`` in its tree.

    The others are numbered from the one after the root on.
    """
    check_place(_NAME, rank, size)

    def name(number: int) -> int:
        return (root + 1 + number) % size

    if rank == root:
        return TreeNode(None, (name(top),), 0)
    node = renamed(place(size - 1, (rank - root - 1) % size), name)
    return TreeNode(root if node.parent is None else node.parent, node.children, node.depth + 1)
