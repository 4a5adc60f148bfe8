"""Reductions within nodes first, so that only a node's share crosses the slower links.

``d`` ranks share a node and there are ``m`` nodes; ``K`` is the size of the tensor. Each node
reduces and scatters over its ranks, the ranks with the same place in their nodes reduce the parts
over the nodes, and each node gathers the results; all three are rings.

Source: Cho, Finkler, Serrano, Kung, Hunter: BlueConnect: decomposing all-reduce for deep learning
on heterogeneous network hierarchy (SysML 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.algorithms.operations import (
    all_gather_by,
    all_reduce_by,
    reduce_scatter_by,
)
from trainwright.collectives.algorithms.plan import Payload, Plan
from trainwright.collectives.algorithms.ring import Ring
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send, Work
from trainwright.collectives.works import JoinedWork


def hierarchical_all_reduce_plan(size: int, rank: int, ranks_per_node: int) -> Plan:
    """Return rank's part; ranks ``k * d`` to ``(k + 1) * d`` are node k, with ``d`` ranks a node.

    Raises:
        UsageError: ``ranks_per_node`` does not divide ``size``.
    """
    check_nodes(size, ranks_per_node)
    num_nodes = size // ranks_per_node
    node, place = divmod(rank, ranks_per_node)
    within = Ring(
        place,
        ranks_per_node,
        first_rank=node * ranks_per_node,
        chunk_pitch=num_nodes,
        width=num_nodes,
    )
    across = Ring(
        node,
        num_nodes,
        first_rank=place,
        rank_pitch=ranks_per_node,
        first_chunk=place * num_nodes,
    )
    first = Payload.CONTRIBUTION if ranks_per_node == 1 else Payload.PARTIAL
    steps = (*within.reduce(), *across.reduce(first), *across.gather(), *within.gather())
    return Plan(
        "hierarchical",
        rank,
        size,
        steps,
        blocks=ranks_per_node,
        pieces=num_nodes,
        kept=(0, size),
    )


def hierarchical_reduce_scatter_plan(size: int, rank: int, ranks_per_node: int) -> Plan:
    """Return rank's part, with nodes as in `hierarchical_all_reduce_plan`.

    Raises:
        UsageError: ``ranks_per_node`` does not divide ``size``.
    """
    within, across = _rings_by_rank(size, rank, ranks_per_node)
    first = Payload.CONTRIBUTION if ranks_per_node == 1 else Payload.PARTIAL
    steps = (*within.reduce(), *across.reduce(first))
    return Plan("hierarchical", rank, size, steps, blocks=size, kept=(rank, rank + 1))


def hierarchical_all_gather_plan(size: int, rank: int, ranks_per_node: int) -> Plan:
    """Return rank's part, with nodes as in `hierarchical_all_reduce_plan`.

    Raises:
        UsageError: ``ranks_per_node`` does not divide ``size``.
    """
    within, across = _rings_by_rank(size, rank, ranks_per_node)
    steps = (*across.gather(), *within.gather())
    given = (rank, rank + 1)
    return Plan("hierarchical", rank, size, steps, blocks=size, given=given, kept=(0, size))


def split_by_nodes(comm: Communicator, ranks_per_node: int) -> tuple[Communicator, Communicator]:
    """Return the communicators of this rank's node, and of the same places in all nodes.

    Ranks ``k * d`` to ``(k + 1) * d`` of ``comm`` are node k, with ``d = ranks_per_node``.

    Raises:
        UsageError: ``ranks_per_node`` does not divide the number of ranks.

    Communicates:
        Two calls of ``comm.split``.
    """
    check_nodes(comm.size, ranks_per_node)
    node = comm.split(comm.rank // ranks_per_node)
    across = comm.split(comm.rank % ranks_per_node)
    assert node is not None
    assert across is not None
    return node, across


def hierarchical_all_reduce(
    node: Communicator,
    across: Communicator,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks of all nodes, in place; every rank gets the same bits.

    Args:
        node: The ``d`` ranks of this rank's node, as many in every node.
        across: The ``m`` ranks with this rank's place, one of each node, in the same order for all
            places. `split_by_nodes` makes both.
        tensor: As in `all_reduce_by`.
        op: As in `all_reduce_by`.
        reduce_dtype: As in `all_reduce_by`.
        deterministic: As in `all_reduce_by`, where it is refused for floating-point numbers.

    Raises:
        UsageError: As in `all_reduce_by`.

    Communicates:
        ``2 * (d - 1) + 2 * (m - 1)`` steps of one message. Each rank sends ``2 * (d - 1) / d * K``
        within its node and ``2 * (m - 1) / m * K / d`` across, ``2 * (n - 1) / n * K`` together
        for ``n = d * m``.
    """
    levels = TwoLevels(node, across)
    plan = hierarchical_all_reduce_plan(levels.size, levels.rank, node.size)
    all_reduce_by(plan, levels, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def hierarchical_reduce_scatter(
    node: Communicator,
    across: Communicator,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``input`` over all ranks; rank r keeps chunk r of its flattened elements.

    Args and Raises: ``node`` and ``across`` as in `hierarchical_all_reduce`, the others as in
    `reduce_scatter_by`.

    Communicates:
        ``d - 1`` steps of ``m`` messages and ``m - 1`` of one. Each rank sends ``(d - 1) / d * K``
        within its node and ``(m - 1) / m * K / d`` across.
    """
    levels = TwoLevels(node, across)
    plan = hierarchical_reduce_scatter_plan(levels.size, levels.rank, node.size)
    reduce_scatter_by(
        plan, levels, output, input, op, reduce_dtype=reduce_dtype, deterministic=deterministic
    )


def hierarchical_all_gather(
    node: Communicator, across: Communicator, output: torch.Tensor, input: torch.Tensor
) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Args and Raises: ``node`` and ``across`` as in `hierarchical_all_reduce`, the others as in
    `all_gather_by`.

    Communicates:
        ``m - 1`` steps of one message and ``d - 1`` of ``m``. Each rank sends
        ``(m - 1) / m * K / d`` across and ``(d - 1) / d * K`` within its node.
    """
    levels = TwoLevels(node, across)
    plan = hierarchical_all_gather_plan(levels.size, levels.rank, node.size)
    all_gather_by(plan, levels, output, input)


def check_nodes(size: int, ranks_per_node: int) -> None:
    """Refuse nodes of unequal sizes.

    Raises:
        UsageError: ``ranks_per_node`` does not divide ``size``.
    """
    if ranks_per_node < 1 or size % ranks_per_node:
        raise UsageError(
            f"hierarchical: ranks_per_node={ranks_per_node} must divide the {size} ranks; leave "
            "ranks out, or use an algorithm without nodes"
        )


def _rings_by_rank(size: int, rank: int, ranks_per_node: int) -> tuple[Ring, Ring]:
    """Return the rings in the node and across, where rank r ends up with chunk r."""
    check_nodes(size, ranks_per_node)
    num_nodes = size // ranks_per_node
    node, place = divmod(rank, ranks_per_node)
    within = Ring(
        place,
        ranks_per_node,
        first_rank=node * ranks_per_node,
        num_messages=num_nodes,
        message_pitch=ranks_per_node,
    )
    across = Ring(
        node,
        num_nodes,
        first_rank=place,
        rank_pitch=ranks_per_node,
        first_chunk=place,
        chunk_pitch=ranks_per_node,
    )
    return within, across


class TwoLevels:
    """All ranks of all nodes, whose messages go by the communicator that both ends share.

    Args:
        node: The ranks of this rank's node.
        across: The ranks with this rank's place, one of each node.
    """

    def __init__(self, node: Communicator, across: Communicator) -> None:
        self._node = node
        self._across = across
        self.rank = across.rank * node.size + node.rank
        self.size = across.size * node.size
        self.device = node.device

    def exchange(self, messages: Sequence[Send | Recv]) -> Work:
        """Start all messages together."""
        within: list[Send | Recv] = []
        across: list[Send | Recv] = []
        for message in messages:
            node, place = divmod(message.peer, self._node.size)
            peer, level = (place, within) if node == self._across.rank else (node, across)
            kind = type(message)
            level.append(kind(message.tensor, peer, message.tag))
        works = []
        if within:
            works.append(self._node.exchange(within))
        if across:
            works.append(self._across.exchange(across))
        return JoinedWork(works)
