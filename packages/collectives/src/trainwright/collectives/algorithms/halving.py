"""Recursive halving and doubling for any number of ranks: few steps and no surplus traffic.

The ranks are cut into a lower and an upper half. Each rank sends its partner in the other half
what it has combined of the other half's chunks, and both halves go on by themselves; results come
back the same way. Where the halves differ by one, the last rank of the lower half has no partner
of its own and sends to the first of the upper half, which happens to no rank twice. ``n`` is the
number of ranks, ``K`` the size of the large tensor, cut into ``n`` chunks by `chunk_bounds`.

Source: Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH
(International Journal of High Performance Computing Applications, 2005), sections 4.4 and 4.5; the
uneven halves replace their first step, which leaves out the ranks beyond a power of two.
"""

from __future__ import annotations

import torch

from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.operations import (
    all_gather_by,
    all_reduce_by,
    reduce_scatter_by,
)
from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step, check_place
from trainwright.collectives.protocol import ReduceOp

_NAME = "halving_doubling"


def halving_doubling_reduce_scatter_plan(size: int, rank: int) -> Plan:
    """Return rank's part of the first half of `halving_doubling_all_reduce`."""
    steps = tuple(_halve(size, rank))
    return Plan(_NAME, rank, size, steps, blocks=size, kept=(rank, rank + 1))


def halving_doubling_all_gather_plan(size: int, rank: int) -> Plan:
    """Return rank's part of the second half of `halving_doubling_all_reduce`."""
    steps = tuple(_double(size, rank))
    return Plan(_NAME, rank, size, steps, blocks=size, given=(rank, rank + 1), kept=(0, size))


def halving_doubling_all_reduce_plan(size: int, rank: int) -> Plan:
    """Return rank's part of both halves: ``2 * ceil(log2 n)`` steps."""
    steps = (*_halve(size, rank), *_double(size, rank))
    return Plan(_NAME, rank, size, steps, blocks=size, kept=(0, size))


def halving_doubling_all_reduce(
    comm: Passage,
    tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``tensor`` over all ranks, in place; every rank gets the same bits.

    Args and Raises: as `all_reduce_by`.

    Communicates:
        ``2 * ceil(log2 n)`` steps. Each rank sends ``(n - 1) / n * K`` in the first half, in at
        most one message a step, and receives as much in the second. Where ``n`` is a power of two,
        it sends ``2 * (n - 1) / n * K`` in ``2 * log2 n`` messages. Otherwise some ranks send one
        message more, and up to about ``K / 2``, and others less; all ranks together send
        ``2 * (n - 1) * K`` for any ``n``. The first step and the second half are in the tensor's
        dtype, the others in ``reduce_dtype``.
    """
    plan = halving_doubling_all_reduce_plan(comm.size, comm.rank)
    all_reduce_by(plan, comm, tensor, op, reduce_dtype=reduce_dtype, deterministic=deterministic)


def halving_doubling_reduce_scatter(
    comm: Passage,
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    *,
    reduce_dtype: torch.dtype | None = None,
    deterministic: bool = False,
) -> None:
    """Combine ``input`` over all ranks; rank r keeps chunk r of its flattened elements.

    Args and Raises: as `reduce_scatter_by`.

    Communicates:
        ``ceil(log2 n)`` steps of at most one message a rank; each sends ``(n - 1) / n * K``.
    """
    plan = halving_doubling_reduce_scatter_plan(comm.size, comm.rank)
    reduce_scatter_by(
        plan, comm, output, input, op, reduce_dtype=reduce_dtype, deterministic=deterministic
    )


def halving_doubling_all_gather(comm: Passage, output: torch.Tensor, input: torch.Tensor) -> None:
    """Put every rank's ``input`` into ``output``: that of rank r becomes its chunk r.

    Args and Raises: as `all_gather_by`.

    Communicates:
        ``ceil(log2 n)`` steps; each rank receives ``(n - 1) / n * K`` in at most one message a
        step, and sends as much where ``n`` is a power of two.
    """
    all_gather_by(halving_doubling_all_gather_plan(comm.size, comm.rank), comm, output, input)


def _halve(size: int, rank: int) -> list[Step]:
    """Return the steps that leave each rank its own chunk, combined."""
    check_place(_NAME, rank, size)
    steps = []
    low, high = 0, size
    for number in range((size - 1).bit_length()):
        payload = Payload.PARTIAL if number else Payload.CONTRIBUTION
        if high - low == 1:
            steps.append(Step())
            continue
        # The lower half is the larger one.
        middle = (low + high + 1) // 2
        lone = middle - 1 if (high - low) % 2 else None
        if rank < middle:
            partner = middle if rank == lone else rank + middle - low
            sources = [] if rank == lone else [partner]
            theirs, (low, high) = (middle, high), (low, middle)
        else:
            partner = rank - middle + low
            sources = [partner] if rank > middle or lone is None else [partner, lone]
            theirs, (low, high) = (low, middle), (middle, high)
        sends = (Part(partner, *theirs, payload),)
        receives = tuple(Part(source, low, high, payload) for source in sources)
        steps.append(Step(sends, receives))
    return steps


def _double(size: int, rank: int) -> list[Step]:
    """Return the steps that bring the results back, each the reverse of one of halving."""
    return [
        Step(_as_results(step.receives), _as_results(step.sends))
        for step in reversed(_halve(size, rank))
    ]


def _as_results(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(Part(part.peer, part.start, part.stop, Payload.RESULT) for part in parts)
