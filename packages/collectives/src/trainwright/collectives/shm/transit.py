"""Where the ranks have their tensors while one collective of large tensors is under way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.shm.operation import copy
from trainwright.collectives.shm.table import IS_DIRECT, OFFSET, STAGED

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

COMBINED = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
GATHERED = (Kind.ALL_GATHER, Kind.BROADCAST)

NUM_SLOTS = 3
_MAX_PIECE_BYTES = 1 << 20
# What one rank writes between two meetings, which are dear; but it must still be in the last of the
# caches when the others read it.
_MAX_PLACE_BYTES = 1 << 22
# Pieces begin at pages, whatever the dtype.
_GRAIN = 1 << 12


@attrs.define(slots=True, eq=False)
class Transit:
    """One collective of large tensors.

    ``flat`` is cut into chunks by ``bounds``: chunk r is what rank r reduces, or contributes. A
    chunk is ``num`` pieces of up to ``step`` elements. ``shown`` is what this rank contributes;
    ``offset`` is where the others find it, or its slots.
    """

    group: ShmBackend
    call: Call
    number: int
    flat: torch.Tensor
    shown: torch.Tensor
    bounds: Sequence[tuple[int, int]]
    step: int
    num: int
    width: int
    offset: int = 0
    is_direct: bool = False
    offsets: list[int] = attrs.Factory(list)
    directs: list[bool] = attrs.Factory(list)

    def contributes(self, rank: int) -> bool:
        """Whether a rank's tensor is read."""
        return self.call.kind is not Kind.BROADCAST or rank == self.call.root

    @property
    def is_answered_once(self) -> bool:
        """Whether the ranks without shared tensors read the answers of an all-reduce in one place.

        Otherwise each of them gets its own.
        """
        return self.group.size > 2

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
        index = (place % NUM_SLOTS) * self.width + (chunk if self.width > 1 else 0)
        offset = self.offset if rank == self.group.rank else self.offsets[rank]
        start = offset + index * self.step * self.flat.dtype.itemsize
        return self.group.segments[rank].view(start, numel, self.flat.dtype)

    def view(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Return elements of the tensor that a rank has in shared memory."""
        offset = self.offsets[rank] + start * self.flat.dtype.itemsize
        return self.group.segments[rank].view(offset, stop - start, self.flat.dtype)

    def stage(self, place: int) -> None:
        """Write the pieces of one place that others read."""
        rank = self.group.rank
        if self.width > 1:
            for chunk in range(self.group.size):
                start, stop = self.piece(chunk, place)
                if start < stop and chunk != rank:
                    self.slot(rank, chunk, place, stop - start).copy_(self.flat[start:stop])
        else:
            part = self.shown[place * self.step : (place + 1) * self.step]
            self.slot(rank, rank, place, part.numel()).copy_(part)
        self.say(STAGED, place + 1)

    def keep(self, place: int) -> None:
        """Copy what has just been shown of a contribution to its place in the result."""
        start, stop = self.piece(self.group.rank, place)
        first = place * self.step
        copy(self.flat[start:stop], self.shown[first : first + stop - start])

    def say(self, field: int, value: int) -> None:
        """Change a field of this rank's slot in the table."""
        self.group.table.say(field, self.number, value)

    def tell(self, field: int, value: int) -> None:
        """Wake the others if this rank was the last of all to say so."""
        self.group.table.tell(field, self.number, value)

    def has(self, rank: int, field: int, value: int) -> bool:
        """Whether a field has come to a value on one of the others."""
        if self.group.table.read(rank, field, self.number) < value:
            return False
        domain = self.group.domain
        if not domain.is_ordered:
            domain.fence()
        return True

    def have(self, field: int, value: int) -> bool:
        """Whether a field has come to a value on all the others."""
        return self.group.table.have(field, self.number, value)


def plan(group: ShmBackend, call: Call, number: int) -> Transit:
    """Find this rank's tensor in shared memory, or take slots for it."""
    assert call.input is not None
    assert call.output is not None
    flat = call.output.view(-1)
    shown = call.input.view(-1)
    width = 1
    if call.kind in COMBINED:
        flat = shown
        width = group.size
        each, longer = divmod(flat.numel(), group.size)
        ends = [rank * each + min(rank, longer) for rank in range(group.size + 1)]
    else:
        ends = [rank * shown.numel() for rank in range(group.size + 1)]
    bounds = list(itertools.pairwise(ends))
    if call.kind is Kind.BROADCAST:
        bounds = bounds[:1] * group.size
    longest = max(stop - start for start, stop in bounds)
    step = _step(longest, flat.dtype.itemsize, width)
    num = -(-longest // step)
    made = Transit(group, call, number, flat, shown, bounds, step, num, width)
    if made.contributes(group.rank):
        _find_or_take(made)
    return made


def _find_or_take(transit: Transit) -> None:
    group = transit.group
    memory = group.domain.own
    offset = memory.find(transit.shown)
    if offset is None and transit.call.kind is Kind.ALL_GATHER:
        start, stop = transit.bounds[group.rank]
        own = transit.flat[start:stop]
        offset = memory.find(own)
        if offset is not None:
            copy(own, transit.shown)
    transit.is_direct = offset is not None
    if offset is None:
        num_bytes = NUM_SLOTS * transit.width * transit.step * transit.flat.dtype.itemsize
        offset = group.take(transit.number, num_bytes)
    transit.offset = offset


def _step(longest: int, itemsize: int, width: int) -> int:
    """Return the elements of a piece, such that the last one is about as long as the others."""
    most = min(_MAX_PIECE_BYTES, _MAX_PLACE_BYTES // width) // itemsize
    num = -(-longest // most)
    return -(-longest // (num * _GRAIN)) * _GRAIN
