"""Whether the plans of all ranks together compute what they promise, found without running them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import attrs

from trainwright.collectives.algorithms.plan import Part, Payload, Plan
from trainwright.collectives.errors import UsageError

# For each chunk: the ranks whose contributions are in what a rank holds; None once given away.
_Held = list[frozenset[int] | None]
# By sender and receiver.
_Messages = defaultdict[tuple[int, int], list[Part]]


def verify_plans(plans: Sequence[Plan]) -> None:
    """Follow every contribution through the steps of all ranks.

    Args:
        plans: The plan of each rank, in rank order.

    Raises:
        UsageError: A message has no other side in the same step; a contribution would be counted
            twice; what was given away is used again; a result is passed on before the
            contributions of all ranks are in it; or a rank lacks a result that it promises.
    """
    size = len(plans)
    for rank, plan in enumerate(plans):
        first = plans[0]
        alike = (first.blocks, first.pieces, len(first.steps))
        if (plan.rank, plan.size) != (rank, size) or alike != (
            plan.blocks,
            plan.pieces,
            len(plan.steps),
        ):
            raise UsageError(f"{plan.algorithm}: plan {rank} of {size} belongs to another world")
    held: list[_Held] = [[frozenset((rank,))] * plans[0].num_chunks for rank in range(size)]
    finished = [set(range(*plan.given)) for plan in plans]
    for number in range(len(plans[0].steps)):
        _check_pairs(plans, number)
        _follow(plans, number, held, finished)
    for plan in plans:
        if plan.in_rank_order and any(p.payload is Payload.PARTIAL for p in plan.parts()):
            raise UsageError(f"{plan.algorithm}: partial results are not in rank order")
        for chunk in range(*plan.kept, plan.kept_pitch):
            if chunk not in finished[plan.rank] and held[plan.rank][chunk] != frozenset(
                range(size)
            ):
                raise UsageError(
                    f"{plan.algorithm}: rank {plan.rank} of {size} ends without the result of "
                    f"chunk {chunk}; it holds {_named(held[plan.rank][chunk])}"
                )


def _check_pairs(plans: Sequence[Plan], number: int) -> None:
    sent: _Messages = defaultdict(list)
    received: _Messages = defaultdict(list)
    for plan in plans:
        for part in plan.steps[number].sends:
            sent[plan.rank, part.peer].append(attrs.evolve(part, peer=plan.rank))
        for part in plan.steps[number].receives:
            received[part.peer, plan.rank].append(part)
    for source, target in sent.keys() | received.keys():
        where = f"{plans[0].algorithm}: step {number}: from rank {source} to rank {target}"
        if source == target:
            raise UsageError(f"{where}: a rank has no messages for itself")
        if sent[source, target] != received[source, target]:
            raise UsageError(
                f"{where}: what is sent, {_told(sent[source, target])}, is not what is received, "
                f"{_told(received[source, target])}"
            )


def _follow(
    plans: Sequence[Plan], number: int, held: list[_Held], finished: list[set[int]]
) -> None:
    before = [list(chunks) for chunks in held]
    done = [set(chunks) for chunks in finished]
    for plan in plans:
        for part in plan.steps[number].sends:
            for chunk in part.chunks():
                where = f"{plan.algorithm}: step {number}: rank {plan.rank}, chunk {chunk}"
                _check_sent(where, plan, part, before[plan.rank][chunk], chunk in done[plan.rank])
                if part.payload is Payload.PARTIAL:
                    held[plan.rank][chunk] = None
    for plan in plans:
        for part in plan.steps[number].receives:
            for chunk in part.chunks():
                where = f"{plan.algorithm}: step {number}: rank {plan.rank}, chunk {chunk}"
                if part.payload is Payload.RESULT:
                    finished[plan.rank].add(chunk)
                    continue
                come = before[part.peer][chunk] or frozenset()
                own = held[plan.rank][chunk]
                if own is None or chunk in done[plan.rank] or own & come:
                    raise UsageError(
                        f"{where}: {_named(come)} arrives where it cannot be added to {_named(own)}"
                    )
                held[plan.rank][chunk] = own | come


def _check_sent(
    where: str, plan: Plan, part: Part, own: frozenset[int] | None, is_finished: bool
) -> None:
    everybody = frozenset(range(plan.size))
    if part.payload is Payload.RESULT:
        if not is_finished and own != everybody:
            raise UsageError(f"{where}: passed on as a result with only {_named(own)} in it")
    elif own is None or is_finished:
        raise UsageError(f"{where}: sent on although it was given away or is a result")
    elif part.payload is Payload.CONTRIBUTION and own != frozenset((plan.rank,)):
        raise UsageError(f"{where}: sent as a contribution, but it holds {_named(own)}")


def _named(ranks: frozenset[int] | None) -> str:
    return "nothing" if ranks is None else f"what ranks {sorted(ranks)} contribute"


def _told(messages: Sequence[Part]) -> str:
    return ", ".join(map(_told_of, messages)) or "nothing"


def _told_of(part: Part) -> str:
    further = f" and {part.count - 1} times {part.pitch} further" if part.count > 1 else ""
    return f"{part.payload.value} of chunks {part.start}..{part.stop}{further}"
