"""Rings: every link carries the same load, and no rank sends more than it must.

The ranks stand in a ring and each step sends one chunk to the next rank while one arrives from the
rank before. ``n`` is the number of ranks, ``K`` the size of the large tensor; the elements are cut
into ``n`` chunks by `chunk_bounds`. A bidirectional ring is two rings in opposite directions with
half of each chunk, for links that carry as much each way at the same time.

Source: Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations
(Journal of Parallel and Distributed Computing, 2009).
"""

from __future__ import annotations

import attrs
import torch

from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import (
    all_gather_by,
    all_reduce_by,
    reduce_scatter_by,
)
from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step, side_by_side
from trainwright.collectives.protocol import ReduceOp


@attrs.frozen
class Ring:
    """``size`` places in a ring as one of them sees it.

    Place p is rank ``first_rank + p * rank_pitch`` and ends up with the ``width`` chunks from
    ``first_chunk + p * chunk_pitch``, and as many at each of ``num_messages`` distances of
    ``message_pitch``; chunks travel to the place that is ``direction`` (1 or -1) away.
    """

    place: int
    size: int
    direction: int = 1
    first_rank: int = 0
    rank_pitch: int = 1
    first_chunk: int = 0
    chunk_pitch: int = 1
    width: int = 1
    num_messages: int = 1
    message_pitch: int = 0

    def reduce(self, first: Payload = Payload.CONTRIBUTION) -> list[Step]:
        """Return the steps after which each place has combined its chunks.

        The partial result of chunk c starts at place c + 1 and collects every place's part on its
        way; ``first`` is what it is when it starts.
        """
        steps = []
        for number in range(1, self.size):
            payload = first if number == 1 else Payload.PARTIAL
            steps.append(self._step(number, number + 1, payload))
        return steps

    def gather(self) -> list[Step]:
        """Return the steps that bring the result of each place's chunks to all places."""
        return [self._step(number, number + 1, Payload.RESULT) for number in range(self.size - 1)]

    def _step(self, leaving: int, arriving: int, payload: Payload) -> Step:
        """Send the chunks of the place ``leaving`` places behind, and so on."""
        return Step(
            self._parts(self.direction, leaving, payload),
            self._parts(-self.direction, arriving, payload),
        )

    def _parts(self, to: int, behind: int, payload: Payload) -> tuple[Part, ...]:
        peer = self.first_rank + (self.place + to) % self.size * self.rank_pitch
        owner = (self.place - self.direction * behind) % self.size
        first = self.first_chunk + owner * self.chunk_pitch
        starts = [first + number * self.message_pitch for number in range(self.num_messages)]
        return tuple(Part(peer, start, start + self.width, payload) for start in starts)


def ring_reduce_scatter_plan(size: int, rank: int) -> Plan:
    """Return rank's part of the first half of `ring_all_reduce`."""
    steps = tuple(Ring(rank, size).reduce())
    return Plan("ring", rank, size, steps, blocks=size, kept=(rank, rank + 1))


def ring_all_gather_plan(size: int, rank: int) -> Plan:
    """Return rank's part of the second half of `ring_all_reduce`."""
    steps = tuple(Ring(rank, size).gather())
    return Plan("ring", rank, size, steps, blocks=size, given=(rank, rank + 1), kept=(0, size))


def ring_all_reduce_plan(size: int, rank: int) -> Plan:
    """Return rank's part of a ring: ``2 * (n - 1)`` steps of one message a rank."""
    ring = Ring(rank, size)
    steps = (*ring.reduce(), *ring.gather())
    return Plan("ring", rank, size, steps, blocks=size, kept=(0, size))


def bidirectional_ring_reduce_scatter_plan(size: int, rank: int) -> Plan:
    """Return rank's part of the first half of `bidirectional_ring_all_reduce`."""
    one, other = _both_ways(size, rank)
    steps = side_by_side(one.reduce(), other.reduce())
    kept = (2 * rank, 2 * rank + 2)
    return Plan("bidirectional_ring", rank, size, steps, blocks=size, pieces=2, kept=kept)


def bidirectional_ring_all_gather_plan(size: int, rank: int) -> Plan:
    """Return rank's part of the second half of `bidirectional_ring_all_reduce`."""
    one, other = _both_ways(size, rank)
    return Plan(
        "bidirectional_ring",
        rank,
        size,
        side_by_side(one.gather(), other.gather()),
        blocks=size,
        pieces=2,
        given=(2 * rank, 2 * rank + 2),
        kept=(0, 2 * size),
    )


def bidirectional_ring_all_reduce_plan(size: int, rank: int) -> Plan:
    """Return rank's part of two rings: ``2 * (n - 1)`` steps of two messages a rank."""
    one, other = _both_ways(size, rank)
    steps = side_by_side([*one.reduce(), *one.gather()], [*other.reduce(), *other.gather()])
    kept = (0, 2 * size)
    return Plan("bidirectional_ring", rank, size, steps, blocks=size, pieces=2, kept=kept)


def ring_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place; every rank gets the same bits.

    Args and Raises: as `all_reduce_by`; ``comm`` has the ranks in the order of the ring.

    Communicates:
        ``2 * (n - 1)`` steps, each of one message to the next rank. Each rank sends all chunks but
        its own, then all but the next rank's: ``2 * (n - 1) / n * K`` where ``n`` divides the
        elements. The first message and the second half are in the tensor's dtype, the others in
        ``reduce_dtype``.
    """
    plan = ring_all_reduce_plan(comm.size, comm.rank)
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def ring_reduce_scatter(
    comm: Passage,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``input`` over all ranks; rank r keeps chunk r of its flattened elements.

    Args and Raises: as `reduce_scatter_by`; ``comm`` has the ranks in the order of the ring.

    Communicates:
        ``n - 1`` steps of one message; each rank sends all chunks but its own: the first one in
        the tensor's dtype, the others in ``reduce_dtype``.
    """
    plan = ring_reduce_scatter_plan(comm.size, comm.rank)
    reduce_scatter_by(
        plan, comm, output, input, op, reduce_dtype=reduce_dtype, deterministic=deterministic
    )


def ring_all_gather(comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Args and Raises: as `all_gather_by`; ``comm`` has the ranks in the order of the ring.

    Communicates:
        ``n - 1`` steps of one message; each rank sends all chunks but the next rank's.
    """
    all_gather_by(ring_all_gather_plan(comm.size, comm.rank), comm, output, input)


def bidirectional_ring_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place, with half of it travelling each way.

    Args and Raises: as `all_reduce_by`; ``comm`` has the ranks in the order of the ring.

    Communicates:
        ``2 * (n - 1)`` steps, each of one message to either neighbour: ``(n - 1) / n * K`` to each
        of them, as much as `ring_all_reduce` together.
    """
    plan = bidirectional_ring_all_reduce_plan(comm.size, comm.rank)
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def bidirectional_ring_reduce_scatter(
    comm: Passage,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``input`` over all ranks; rank r keeps chunk r of its flattened elements.

    Args and Raises: as `reduce_scatter_by`; ``comm`` has the ranks in the order of the ring.

    Communicates:
        ``n - 1`` steps, each of one message to either neighbour: ``(n - 1) / (2 * n) * K`` to each.
    """
    plan = bidirectional_ring_reduce_scatter_plan(comm.size, comm.rank)
    reduce_scatter_by(
        plan, comm, output, input, op, reduce_dtype=reduce_dtype, deterministic=deterministic
    )


def bidirectional_ring_all_gather(comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Args and Raises: as `all_gather_by`; ``comm`` has the ranks in the order of the ring.

    Communicates:
        ``n - 1`` steps, each of one message to either neighbour: ``(n - 1) / (2 * n) * K`` to each.
    """
    plan = bidirectional_ring_all_gather_plan(comm.size, comm.rank)
    all_gather_by(plan, comm, output, input)


def _both_ways(size: int, rank: int) -> tuple[Ring, Ring]:
    one = Ring(rank, size, chunk_pitch=2)
    return one, Ring(rank, size, direction=-1, first_chunk=1, chunk_pitch=2)
