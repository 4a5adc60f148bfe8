"""Large tensors: in shared memory they are combined where they lie, others pass through in pieces.

A rank's tensor passes through a few slots of its segment that stay in the processors' caches: while
the others read one piece, the next ones are written. Ranks whose tensors live in shared memory and
ranks whose tensors do not may meet in one collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.shm.operation import Steps, copy
from trainwright.collectives.shm.table import IS_DIRECT, OFFSET, REDUCED, STAGED, TAKEN, encode

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

_LARGE_BYTES = 1 << 16
_PIECE_BYTES = 1 << 19
_NUM_SLOTS = 3
# How many pieces a rank writes before it looks at those of the others.
_AHEAD = 2
_COMBINED = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
_GATHERED = (Kind.ALL_GATHER, Kind.BROADCAST)


def are_worth_it(call: Call) -> bool:
    """Whether the collective is one of large tensors; all ranks say the same."""
    if call.input is None or call.output is None:
        return False
    is_known = call.kind in _COMBINED or call.kind in _GATHERED
    return is_known and max(call.input.nbytes, call.output.nbytes) > _LARGE_BYTES


def take_part(group: ShmBackend, call: Call, number: int) -> Steps:
    """Yield until the collective is over for this rank."""
    made = _plan_combined if call.kind in _COMBINED else _plan_gathered
    transit = made(group, call, number)
    table = group.table
    table.post(number, encode(call), transit.offset, transit.num if transit.is_direct else 0)
    if not transit.is_direct and transit.contributes(group.rank):
        transit.stage(0)
    group.domain.ring()
    while not table.are_posted(number):
        yield
    table.check_agreement(number)
    transit.look()
    if call.kind in _GATHERED:
        yield from _gather(transit)
    elif all(transit.directs):
        _combine_where_they_lie(transit)
    else:
        yield from _combine_in_pieces(transit)
    table.finish(number)
    group.domain.ring()
    if transit.is_direct:
        while not table.are_finished(number):
            yield


@attrs.define(slots=True, eq=False)
class _Transit:
    """One collective of large tensors.

    ``flat`` is cut into chunks by ``bounds``: chunk r is what rank r reduces, or contributes. A
    chunk is ``num`` pieces of up to ``step`` elements. ``offset`` is where the others find this
    rank's tensor (all of it where it is to be combined, else its contribution), or its slots.
    """

    group: ShmBackend
    call: Call
    number: int
    flat: torch.Tensor
    bounds: Sequence[tuple[int, int]]
    offset: int
    is_direct: bool
    step: int = 0
    num: int = 0
    offsets: list[int] = attrs.Factory(list)
    directs: list[bool] = attrs.Factory(list)

    def __attrs_post_init__(self) -> None:
        self.step = _PIECE_BYTES // self.flat.dtype.itemsize
        longest = max(stop - start for start, stop in self.bounds)
        self.num = -(-longest // self.step)

    def contributes(self, rank: int) -> bool:
        """Whether a rank's tensor is read."""
        return self.call.kind is not Kind.BROADCAST or rank == self.call.root

    def look(self) -> None:
        """Read where the others have their tensors."""
        table = self.group.table
        ranks = range(self.group.size)
        self.offsets = [table.read(rank, OFFSET, self.number) for rank in ranks]
        self.directs = [bool(table.read(rank, IS_DIRECT, self.number)) for rank in ranks]

    def piece(self, chunk: int, place: int) -> tuple[int, int]:
        """Return where a piece begins and ends."""
        start, stop = self.bounds[chunk]
        start += place * self.step
        return start, min(start + self.step, stop)

    def slot(self, rank: int, chunk: int, place: int, numel: int) -> torch.Tensor:
        """Return the slot of a piece in the segment of a rank."""
        width = self.group.size if self.call.kind in _COMBINED else 1
        index = (place % _NUM_SLOTS) * width + (chunk if width > 1 else 0)
        offset = self.offset if rank == self.group.rank else self.offsets[rank]
        segment = self.group.segments[rank]
        return segment.view(offset + index * _PIECE_BYTES, numel, self.flat.dtype)

    def view(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Return elements of the tensor that a rank has in shared memory."""
        offset = self.offsets[rank] + start * self.flat.dtype.itemsize
        return self.group.segments[rank].view(offset, stop - start, self.flat.dtype)

    def stage(self, place: int) -> None:
        """Write the pieces of one place that others read."""
        rank = self.group.rank
        is_combined = self.call.kind in _COMBINED
        for chunk in range(self.group.size) if is_combined else (rank,):
            start, stop = self.piece(chunk, place)
            if start < stop and (chunk != rank or not is_combined):
                self.slot(rank, chunk, place, stop - start).copy_(self.flat[start:stop])
        self.say(STAGED, place + 1)

    def say(self, field: int, value: int) -> None:
        """Change a field of this rank's slot in the table."""
        self.group.table.say(field, self.number, value)

    def have(self, field: int, value: int) -> bool:
        """Whether a field has come to a value on all the others."""
        return self.group.table.have(field, self.number, value)


def _plan_combined(group: ShmBackend, call: Call, number: int) -> _Transit:
    assert call.input is not None
    flat = call.input.view(-1)
    each, longer = divmod(flat.numel(), group.size)
    ends = [rank * each + min(rank, longer) for rank in range(group.size + 1)]
    bounds = list(itertools.pairwise(ends))
    offset = group.domain.own.find(flat)
    is_direct = offset is not None
    if offset is None:
        offset = group.take(number, group.size * _NUM_SLOTS * _PIECE_BYTES)
    return _Transit(group, call, number, flat, bounds, offset, is_direct)


def _plan_gathered(group: ShmBackend, call: Call, number: int) -> _Transit:
    assert call.input is not None
    assert call.output is not None
    flat = call.output.view(-1)
    numel = call.input.numel()
    bounds = [(0, numel)] * group.size
    own = flat
    if call.kind is Kind.ALL_GATHER:
        bounds = [(rank * numel, (rank + 1) * numel) for rank in range(group.size)]
        own = flat[group.rank * numel : (group.rank + 1) * numel]
        copy(own, call.input.view(-1))
    transit = _Transit(group, call, number, flat, bounds, 0, False)
    if transit.contributes(group.rank):
        memory = group.domain.own
        offset = memory.find(call.input)
        if offset is None:
            offset = memory.find(own)
        transit.is_direct = offset is not None
        if offset is None:
            offset = group.take(number, _NUM_SLOTS * _PIECE_BYTES)
        transit.offset = offset
    return transit


def _gather(transit: _Transit) -> Steps:
    rank = transit.group.rank
    sources = [other for other in range(transit.group.size) if transit.contributes(other)]
    is_staging = rank in sources and not transit.is_direct
    others = [other for other in sources if other != rank]
    if all(transit.directs[other] for other in sources):
        for other in others:
            start, stop = transit.bounds[other]
            transit.flat[start:stop].copy_(transit.view(other, 0, stop - start))
        return
    table = transit.group.table
    num_staged = 1
    for place in range(transit.num):
        while is_staging and num_staged < min(transit.num, place + _AHEAD):
            while not transit.have(TAKEN, num_staged - _NUM_SLOTS + 1):
                yield
            transit.stage(num_staged)
            num_staged += 1
            transit.group.domain.ring()
        for other in others:
            while not table.has(other, STAGED, transit.number, place + 1):
                yield
            start, stop = transit.piece(other, place)
            first = start - transit.bounds[other][0]
            if transit.directs[other]:
                source = transit.view(other, first, first + stop - start)
            else:
                source = transit.slot(other, other, place, stop - start)
            transit.flat[start:stop].copy_(source)
        transit.say(TAKEN, place + 1)
        transit.group.domain.ring()


def _combine_where_they_lie(transit: _Transit) -> None:
    rank = transit.group.rank
    start, stop = transit.bounds[rank]
    if start == stop:
        return
    views = [transit.view(other, start, stop) for other in range(transit.group.size)]
    views[rank] = transit.flat[start:stop]
    outputs = views
    if transit.call.kind is Kind.REDUCE_SCATTER:
        assert transit.call.output is not None
        outputs = [transit.call.output.view(-1)]
    _combine(transit, outputs, views)


def _combine_in_pieces(transit: _Transit) -> Steps:
    is_gathered = transit.call.kind is Kind.ALL_REDUCE
    ring = transit.group.domain.ring
    num_staged = 1
    for place in range(transit.num):
        while not transit.is_direct and num_staged < min(transit.num, place + _AHEAD):
            while not transit.have(REDUCED, num_staged - _NUM_SLOTS + 1):
                yield
            transit.stage(num_staged)
            num_staged += 1
            ring()
        while not transit.have(STAGED, place + 1):
            yield
        while is_gathered and not transit.have(TAKEN, place - _NUM_SLOTS + 1):
            yield
        _combine_piece(transit, place)
        transit.say(REDUCED, place + 1)
        ring()
        if is_gathered and place > 0:
            yield from _collect(transit, place - 1)
    if is_gathered:
        yield from _collect(transit, transit.num - 1)


def _combine_piece(transit: _Transit, place: int) -> None:
    rank = transit.group.rank
    start, stop = transit.piece(rank, place)
    if start >= stop:
        return
    own = transit.flat[start:stop]
    parts = []
    for other, is_direct in enumerate(transit.directs):
        if other == rank:
            parts.append(own)
        elif is_direct:
            parts.append(transit.view(other, start, stop))
        else:
            parts.append(transit.slot(other, rank, place, stop - start))
    if transit.call.kind is Kind.REDUCE_SCATTER:
        assert transit.call.output is not None
        first = place * transit.step
        outputs = [transit.call.output.view(-1)[first : first + stop - start]]
    elif transit.is_direct:
        outputs = [own]
    else:
        outputs = [own, transit.slot(rank, rank, place, stop - start)]
    _combine(transit, outputs, parts)


def _collect(transit: _Transit, place: int) -> Steps:
    """Copy the results of one place from those who have reduced them."""
    while not transit.have(REDUCED, place + 1):
        yield
    for other, is_direct in enumerate(transit.directs):
        start, stop = transit.piece(other, place)
        if other == transit.group.rank or start >= stop:
            continue
        if is_direct:
            source = transit.view(other, start, stop)
        else:
            source = transit.slot(other, other, place, stop - start)
        transit.flat[start:stop].copy_(source)
    transit.say(TAKEN, place + 1)
    transit.group.domain.ring()


def _combine(
    transit: _Transit, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> None:
    op = transit.call.op
    wide = transit.call.reduce_dtype
    assert op is not None
    assert wide is not None
    transit.group.domain.adder.combine(outputs, parts, op, wide)
