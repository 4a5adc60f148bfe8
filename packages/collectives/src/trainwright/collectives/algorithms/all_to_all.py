"""All-to-all at once, or gathered in the nodes so that few messages cross the slower links.

``n`` ranks have ``n`` parts each, one for every rank; ``K`` is the size of a rank's whole tensor.
Chunk ``s * n + t`` of a plan is what rank s has for rank t. With ``d`` ranks a node and ``m``
nodes, a part first goes to the rank of its own node that stands in it as the receiver does in its
node, and from there, together with those of the other ranks of the node, across.

Source: Rajbhandari, Li, Yao, Zhang, Aminabadi, Awan, Rasley, He: DeepSpeed-MoE (ICML 2022), section
5.2, hierarchical all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.hierarchical import TwoLevels, check_nodes
from trainwright.collectives.algorithms.operations import check_plan
from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step, check_place
from trainwright.collectives.checks import check_apart, check_same_dtype, check_tensor
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Communicator, Recv, Send


def direct_all_to_all_plan(size: int, rank: int) -> Plan:
    """Return rank's part of sending every other rank its part: one step."""
    check_place("direct", rank, size)
    others = [(rank + away) % size for away in range(1, size)]
    sends = [_message(peer, rank * size + peer) for peer in others]
    receives = [_message(peer, peer * size + rank) for peer in others]
    return _plan("direct", size, rank, [(sends, receives)])


def hierarchical_all_to_all_plan(size: int, rank: int, ranks_per_node: int) -> Plan:
    """Return rank's part; ranks ``k * d`` to ``(k + 1) * d`` are node k, with ``d`` ranks a node.

    Raises:
        UsageError: ``ranks_per_node`` does not divide ``size``.
    """
    check_nodes(size, ranks_per_node)
    check_place("hierarchical", rank, size)
    num_places, num_nodes = ranks_per_node, size // ranks_per_node
    node, place = divmod(rank, num_places)
    first = node * num_places
    near = [first + (place + away) % num_places for away in range(1, num_places)]
    far = [(node + away) % num_nodes * num_places + place for away in range(1, num_nodes)]
    # What rank has for all ranks with the peer's place, then what its node has for the peer.
    within = (
        [_message(q, rank * size + q - first, num_nodes, num_places) for q in near],
        [_message(q, q * size + place, num_nodes, num_places) for q in near],
    )
    across = (
        [_message(q, first * size + q, num_places, size) for q in far],
        [_message(q, (q - place) * size + rank, num_places, size) for q in far],
    )
    return _plan("hierarchical", size, rank, [within, across])


def direct_all_to_all(comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Send part q of ``input`` to rank q; what rank q sends becomes part q of ``output``.

    Args and Raises: as `all_to_all_by`.

    Communicates:
        One step of ``n * (n - 1)`` messages; each rank sends ``(n - 1) / n * K`` in ``n - 1``.
    """
    all_to_all_by(direct_all_to_all_plan(comm.size, comm.rank), comm, output, input)


def hierarchical_all_to_all(
    node: Communicator, across: Communicator, output: torch.Tensor, input: torch.Tensor
) -> None:
    """Send part q of ``input`` to rank q; what rank q sends becomes part q of ``output``.

    Args:
        node: The ``d`` ranks of this rank's node, as many in every node.
        across: The ``m`` ranks with this rank's place, one of each node, in the same order for all
            places. `split_by_nodes` makes both; rank r of all is the one of node ``r // d`` with
            place ``r % d``.
        output: As in `all_to_all_by`.
        input: As in `all_to_all_by`.

    Raises:
        UsageError: As in `all_to_all_by`.

    Communicates:
        Two steps. Each rank sends ``(d - 1) / d * K`` within its node in ``d - 1`` messages, then
        ``(m - 1) / m * K`` across in ``m - 1``, where a direct exchange needs ``(m - 1) * d`` for
        as much. It holds ``K`` besides its tensors.
    """
    levels = TwoLevels(node, across)
    plan = hierarchical_all_to_all_plan(levels.size, levels.rank, node.size)
    all_to_all_by(plan, levels, output, input)


def all_to_all_by(plan: Plan, comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Send part q of ``input`` to rank q; what rank q sends becomes part q of ``output``.

    This is ``Communicator.all_to_all`` of equal parts.

    Args:
        plan: This rank's plan of an all-to-all.
        comm: The ranks of the plan.
        output: Contiguous, of the same shape and dtype on all ranks; apart from ``input``.
        input: As many elements of the same dtype, cut in order into ``n`` equal parts.

    Raises:
        UsageError: The tensors differ in size or dtype or overlap, ``n`` does not divide their
            elements, ``output`` is not contiguous, or the plan is that of another rank, world or
            collective.

    Communicates:
        What the plan says: ``plan.num_sent(n * input.numel())`` elements.
    """
    what = f"{plan.algorithm}_all_to_all"
    check_plan(what, plan, comm)
    size = comm.size
    if plan.num_chunks != size * size or any(p.payload is not Payload.RESULT for p in plan.parts()):
        raise UsageError(f"{what}: the plan is not that of an all-to-all; make it with its own")
    source = check_tensor(what, input, comm.device)
    target = check_tensor(what, output, comm.device)
    check_same_dtype(what, target, source)
    if target.numel() != source.numel() or source.numel() % size or not target.is_contiguous():
        raise UsageError(
            f"{what}: output {list(target.shape)} must be contiguous and have as many elements as "
            f"input {list(source.shape)}, and {size} ranks must divide them; for other parts use "
            "the communicator's all_to_all with splits"
        )
    source = source.contiguous()
    check_apart(what, target, source)
    if source.numel():
        _move(plan, comm, target.view(size, -1), source.view(size, -1))


def _move(plan: Plan, comm: Passage, target: torch.Tensor, source: torch.Tensor) -> None:
    """Do all steps; row q of ``source`` is for rank q, row q of ``target`` from it."""
    size, rank = plan.size, plan.rank
    held = {rank * size + peer: row for peer, row in enumerate(source.unbind(0))}
    target[rank].copy_(source[rank])
    for step in plan.steps:
        messages: list[Send | Recv] = []
        relayed: list[tuple[Part, torch.Tensor]] = []
        for part in step.receives:
            buffer = _final_rows(part, target, rank)
            if buffer is None:
                buffer = source.new_empty((part.count * (part.stop - part.start), source.shape[1]))
                relayed.append((part, buffer))
            messages.append(Recv(buffer.view(-1), part.peer))
        for part in step.sends:
            rows = [held.pop(chunk) for chunk in part.chunks()]
            messages.append(Send(rows[0] if len(rows) == 1 else torch.cat(rows), part.peer))
        comm.exchange(messages).wait()
        for part, buffer in relayed:
            for chunk, row in zip(part.chunks(), buffer.unbind(0), strict=True):
                sender, receiver = divmod(chunk, size)
                if receiver == rank:
                    target[sender].copy_(row)
                else:
                    held[chunk] = row


def _final_rows(part: Part, target: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Return the rows that a message fills if all of it is for this rank, in order."""
    size = target.shape[0]
    sender, receiver = divmod(part.start, size)
    is_row = part.stop - part.start == 1 and (part.count == 1 or part.pitch == size)
    return target[sender : sender + part.count] if is_row and receiver == rank else None


def _plan(
    algorithm: str, size: int, rank: int, steps: Iterable[tuple[list[Part], list[Part]]]
) -> Plan:
    return Plan(
        algorithm,
        rank,
        size,
        tuple(Step(tuple(sends), tuple(receives)) for sends, receives in steps if sends),
        blocks=size * size,
        given=(rank * size, rank * size + size),
        kept=(rank, size * size - size + rank + 1),
        kept_pitch=size,
    )


def _message(peer: int, chunk: int, count: int = 1, pitch: int = 0) -> Part:
    return Part(peer, chunk, chunk + 1, Payload.RESULT, count, pitch if count > 1 else 0)
