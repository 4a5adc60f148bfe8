"""Reductions and broadcasts through one binary tree or two at once.

Contributions are combined on the way up and results copied on the way down. The tensor is cut into
``k`` chunks a tree that follow each other, up and down at the same time. ``n`` is the number of
ranks, ``K`` the size of the tensor and ``h = floor(log2 n)`` the height of a tree.

One tree has few steps, but inner ranks send the tensor three times. In a double tree each of two
trees carries half of it, and the inner ranks of one are the leaves of the other: no rank sends
more than ``2 * K``, however many ranks there are. It sends at most four messages in a step: one up
and two down in the tree where it is an inner rank, and one up in the other.

Source: Sanders, Speck, Träff: Two-tree algorithms for full bandwidth broadcast, reduction and scan
(Parallel Computing, 2009), which lets a rank send and receive one message a step and so counts up
to four steps where this counts one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import all_reduce_by, broadcast_by, reduce_by
from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step, side_by_side
from trainwright.collectives.algorithms.trees import (
    TreeNode,
    node_below,
    tree_height,
    tree_node,
    twin_node,
)
from trainwright.collectives.checks import check_is_tensor
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import ReduceOp

# Takes longer to send than a message to start; tensors that are worth cutting have many of them.
_CHUNK_BYTES = 1 << 20


def tree_all_reduce_plan(size: int, rank: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a tree: ``2 * h + k - 1`` steps for ``k = num_chunks``."""
    climb = _Climb(size, lambda other: tree_node(size, other), 0, num_chunks)
    steps = tuple(climb.up_and_down(rank))
    return Plan("tree", rank, size, steps, pieces=num_chunks, kept=(0, num_chunks))


def tree_reduce_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a reduction to ``root``: ``h + k - 1`` steps."""
    climb = _Climb(size, lambda other: node_below(size, other, root), 0, num_chunks)
    kept = (0, num_chunks if rank == root else 0)
    return Plan("tree", rank, size, tuple(climb.up(rank)), pieces=num_chunks, kept=kept)


def tree_broadcast_plan(size: int, rank: int, root: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of a broadcast from ``root``: ``h + k - 1`` steps."""
    climb = _Climb(size, lambda other: node_below(size, other, root), 0, num_chunks)
    return Plan(
        "tree",
        rank,
        size,
        tuple(climb.down(rank)),
        pieces=num_chunks,
        given=(0, num_chunks if rank == root else 0),
        kept=(0, num_chunks),
    )


def double_tree_all_reduce_plan(size: int, rank: int, num_chunks: int = 1) -> Plan:
    """Return rank's part of two trees: ``2 * h + k - 1`` steps for k chunks in each."""
    first = _Climb(size, lambda other: tree_node(size, other), 0, num_chunks)
    second = _Climb(size, lambda other: twin_node(size, other), num_chunks, num_chunks)
    steps = side_by_side(first.up_and_down(rank), second.up_and_down(rank))
    kept = (0, 2 * num_chunks)
    return Plan("double_tree", rank, size, steps, blocks=2, pieces=num_chunks, kept=kept)


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
    plan = tree_all_reduce_plan(comm.size, comm.rank, _num_chunks(tensor, num_chunks, 1))
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
    plan = tree_reduce_plan(comm.size, comm.rank, root, _num_chunks(tensor, num_chunks, 1))
    reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def tree_broadcast(
    comm: Passage, tensor: torch.Tensor, root: int, *, num_chunks: int | None = None
) -> None:
    """Copy root's ``tensor`` to every rank, in place, through one binary tree.

    Args and Raises: as `broadcast_by`; ``num_chunks`` as in `tree_all_reduce`.

    Communicates:
        ``h + k - 1`` steps; every rank sends each of its children ``K`` in ``k`` messages.
    """
    plan = tree_broadcast_plan(comm.size, comm.rank, root, _num_chunks(tensor, num_chunks, 1))
    broadcast_by(plan, comm, tensor)


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
    plan = double_tree_all_reduce_plan(comm.size, comm.rank, _num_chunks(tensor, num_chunks, 2))
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def _num_chunks(tensor: torch.Tensor, num_chunks: int | None, num_trees: int) -> int:
    if num_chunks is None:
        check_is_tensor("tree", tensor)
        return max(1, math.ceil(tensor.nbytes / num_trees / _CHUNK_BYTES))
    if num_chunks < 1:
        raise UsageError(
            f"tree: num_chunks={num_chunks} must be at least 1, or None to cut by size"
        )
    return num_chunks


@attrs.frozen
class _Climb:
    """The chunks of one tree on their way up, down, or up and down."""

    size: int
    node: Callable[[int], TreeNode]
    first_chunk: int
    num_chunks: int

    def up(self, rank: int) -> list[Step]:
        """Return the steps after which the root has combined all chunks, one after the other."""
        height = tree_height(self.size)
        node = self.node(rank)
        # Whoever has heard nobody passes on what is its own.
        leaving = Payload.PARTIAL if node.children else Payload.CONTRIBUTION
        parents = [] if node.parent is None else [(node.parent, leaving)]
        children = [
            (child, Payload.PARTIAL if self.node(child).children else Payload.CONTRIBUTION)
            for child in node.children
        ]
        sends = self._each_chunk(parents, height - node.depth)
        receives = self._each_chunk(children, height - node.depth - 1)
        return _steps(sends, receives, self._num_steps(height))

    def down(self, rank: int) -> list[Step]:
        """Return the steps after which all ranks have the root's chunks."""
        node = self.node(rank)
        parents = [] if node.parent is None else [(node.parent, Payload.RESULT)]
        children = [(child, Payload.RESULT) for child in node.children]
        sends = self._each_chunk(children, node.depth)
        receives = self._each_chunk(parents, node.depth - 1)
        return _steps(sends, receives, self._num_steps(tree_height(self.size)))

    def up_and_down(self, rank: int) -> tuple[Step, ...]:
        """Return the steps up and down; a chunk turns round while others are on their way up."""
        turn = [Step()] * tree_height(self.size)
        return side_by_side(self.up(rank), [*turn, *self.down(rank)])

    def _each_chunk(
        self, peers: list[tuple[int, Payload]], first_step: int
    ) -> dict[int, tuple[Part, ...]]:
        parts = {}
        for number in range(self.num_chunks):
            chunk = self.first_chunk + number
            parts[first_step + number] = tuple(
                Part(peer, chunk, chunk + 1, payload) for peer, payload in peers
            )
        return parts

    def _num_steps(self, height: int) -> int:
        return height + self.num_chunks - 1 if height else 0


def _steps(
    sends: dict[int, tuple[Part, ...]], receives: dict[int, tuple[Part, ...]], num_steps: int
) -> list[Step]:
    return [Step(sends.get(n, ()), receives.get(n, ())) for n in range(num_steps)]
