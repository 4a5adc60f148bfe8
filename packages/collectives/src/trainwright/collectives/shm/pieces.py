"""Large tensors: in shared memory they are combined where they lie, others pass through in pieces.

A rank's tensor passes through a few slots of its segment that stay in the processors' caches: while
the others read one piece, the next ones are written. Ranks whose tensors live in shared memory and
ranks whose tensors do not may meet in one collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.shm.operation import Steps
from trainwright.collectives.shm.table import POSTED, REDUCED, STAGED, TAKEN, encode
from trainwright.collectives.shm.transit import COMBINED, GATHERED, NUM_SLOTS, Transit, plan

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

_LARGE_BYTES = 1 << 16
# How many pieces a rank writes before it looks at those of the others.
_AHEAD = 2


def are_worth_it(call: Call) -> bool:
    """Whether the collective is one of large tensors; all ranks say the same."""
    if call.input is None or call.output is None:
        return False
    is_known = call.kind in COMBINED or call.kind in GATHERED
    return is_known and max(call.input.nbytes, call.output.nbytes) > _LARGE_BYTES


def take_part(group: ShmBackend, call: Call, number: int) -> Steps:
    """Yield until the collective is over for this rank."""
    transit = plan(group, call, number)
    table = group.table
    table.post(number, encode(call), transit.offset, transit.num if transit.is_direct else 0)
    if not transit.is_direct and transit.contributes(group.rank):
        transit.stage(0)
    table.tell(POSTED, number, number + 1)
    if call.kind is Kind.ALL_GATHER:
        for place in range(transit.num if transit.is_direct else 1):
            transit.keep(place)
    while not table.are_posted(number):
        yield
    table.check_agreement(number)
    transit.look()
    if call.kind in GATHERED:
        yield from _gather(transit)
    elif all(transit.directs):
        _combine_where_they_lie(transit)
    else:
        yield from _combine_in_pieces(transit)
    table.finish(number)
    if transit.is_direct:
        while not table.are_finished(number):
            yield


def _gather(transit: Transit) -> Steps:
    rank = transit.group.rank
    sources = [other for other in range(transit.group.size) if transit.contributes(other)]
    is_staging = rank in sources and not transit.is_direct
    others = [other for other in sources if other != rank]
    if all(transit.directs[other] for other in sources):
        for other in others:
            start, stop = transit.bounds[other]
            transit.flat[start:stop].copy_(transit.view(other, 0, stop - start))
        return
    num_staged = 1
    for place in range(transit.num):
        while is_staging and num_staged < min(transit.num, place + _AHEAD):
            while not transit.have(TAKEN, num_staged - NUM_SLOTS + 1):
                yield
            transit.stage(num_staged)
            transit.group.domain.ring()
            transit.keep(num_staged)
            num_staged += 1
        for other in others:
            while not transit.has(other, STAGED, place + 1):
                yield
            start, stop = transit.piece(other, place)
            first = start - transit.bounds[other][0]
            if transit.directs[other]:
                source = transit.view(other, first, first + stop - start)
            else:
                source = transit.slot(other, other, place, stop - start)
            transit.flat[start:stop].copy_(source)
        transit.tell(TAKEN, place + 1)


def _combine_where_they_lie(transit: Transit) -> None:
    rank = transit.group.rank
    start, stop = transit.bounds[rank]
    if start == stop:
        return
    parts = [transit.view(other, start, stop) for other in range(transit.group.size)]
    parts[rank] = transit.flat[start:stop]
    _combine(transit, parts, 0)


def _combine_in_pieces(transit: Transit) -> Steps:
    is_gathered = transit.call.kind is Kind.ALL_REDUCE
    num_staged = 1
    for place in range(transit.num):
        while not transit.is_direct and num_staged < min(transit.num, place + _AHEAD):
            # An all-reduce has collected the answer that was in the slot.
            while not is_gathered and not transit.have(REDUCED, num_staged - NUM_SLOTS + 1):
                yield
            transit.stage(num_staged)
            num_staged += 1
            transit.tell(STAGED, num_staged)
        while not transit.have(STAGED, place + 1):
            yield
        _combine_piece(transit, place)
        if is_gathered and place > 0:
            yield from _collect(transit, place - 1)
    if is_gathered:
        yield from _collect(transit, transit.num - 1)
        if not transit.is_direct and not transit.is_answered_once:
            transit.group.release(transit.number)


def _combine_piece(transit: Transit, place: int) -> None:
    rank = transit.group.rank
    start, stop = transit.piece(rank, place)
    if start < stop:
        parts = []
        for other, is_direct in enumerate(transit.directs):
            if other == rank:
                parts.append(transit.flat[start:stop])
            elif is_direct:
                parts.append(transit.view(other, start, stop))
            else:
                parts.append(transit.slot(other, rank, place, stop - start))
        _combine(transit, parts, place * transit.step)
    transit.tell(REDUCED, place + 1)


def _collect(transit: Transit, place: int) -> Steps:
    """Copy the answers of one place; they are in the tensor itself where that is shared."""
    while not transit.is_direct and not transit.have(REDUCED, place + 1):
        yield
    rank = transit.group.rank
    for other in range(transit.group.size):
        start, stop = transit.piece(other, place)
        if other == rank or start == stop or transit.is_direct:
            continue
        if not transit.is_answered_once:
            answer = transit.slot(rank, other, place, stop - start)
        elif transit.directs[other]:
            answer = transit.view(other, start, stop)
        else:
            answer = transit.slot(other, other, place, stop - start)
        transit.flat[start:stop].copy_(answer)


def _combine(transit: Transit, parts: list[torch.Tensor], first: int) -> None:
    """Combine the parts of all ranks, and put the answer of an all-reduce where it is read.

    Of two ranks, each gets the other's answer where its part was: whoever has read a line of the
    cache last writes it next, so that it need not be called back. More ranks read one answer in
    the slot that nobody else writes; by the time that one is used again, all have collected it,
    because they have shown a later piece.
    """
    call = transit.call
    assert call.op is not None
    assert call.reduce_dtype is not None
    assert call.output is not None
    own = parts[transit.group.rank]
    if call.kind is Kind.ALL_REDUCE and transit.is_answered_once:
        outputs = _places_of_answer(transit, parts, first)
    elif call.kind is Kind.ALL_REDUCE:
        outputs = [own, *(part for part in parts if part is not own)]
    else:
        outputs = [call.output.view(-1)[first : first + own.numel()]]
    transit.group.domain.combiner.combine(outputs, parts, call.op, call.reduce_dtype)


def _places_of_answer(
    transit: Transit, parts: list[torch.Tensor], first: int
) -> list[torch.Tensor]:
    """Return where to write an answer that all ranks without shared tensors read in one place."""
    rank = transit.group.rank
    outputs = [parts[rank]]
    if not transit.is_direct:
        outputs.insert(0, transit.slot(rank, rank, first // transit.step, parts[rank].numel()))
    outputs += [
        part for other, part in enumerate(parts) if other != rank and transit.directs[other]
    ]
    return outputs
