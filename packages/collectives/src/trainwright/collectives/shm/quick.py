"""Sums of a few numbers, with as little between the call and the sum as Python allows.

The contributions lie in the ranks' tables, next to the flags, where each slot has a little room;
what a call of the same kind needs, the views of that room among it, is made once and kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.protocol import ReduceOp
from trainwright.collectives.shm.operation import Steps
from trainwright.collectives.shm.table import NUM_SLOTS, ROOM_BYTES, encode

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

_MAX_KEPT = 16

_Key = tuple[torch.Size, torch.dtype | None, object, torch.dtype | None]


class Quick:
    """The small all-reduces of one group."""

    def __init__(self, group: ShmBackend) -> None:
        self._group = group
        self._plans: dict[_Key, _Plan] = {}

    def steps(self, call: Call, number: int) -> Steps | None:
        """Return the steps of an all-reduce if it is small."""
        tensor = call.output
        if call.kind is not Kind.ALL_REDUCE or tensor is None:
            return None
        key = (tensor.shape, call.dtype, call.op, call.reduce_dtype)
        plan = self._plans.get(key)
        if plan is None:
            if tensor.nbytes > ROOM_BYTES:
                return None
            if len(self._plans) >= _MAX_KEPT:
                self._plans.clear()
            plan = self._plans[key] = _Plan(self._group, call)
        return _take_part(self._group, call, number, plan)


class _Plan:
    """What all calls of one shape, dtype and operation have in common."""

    def __init__(self, group: ShmBackend, call: Call) -> None:
        assert call.output is not None
        self.code = encode(call)
        self._group = group
        self._shape = call.output.shape
        self._dtype = call.output.dtype
        self.is_plain_pair = (
            group.size == 2 and call.op is ReduceOp.SUM and call.reduce_dtype is self._dtype
        )
        self._views: list[list[torch.Tensor] | None] = [None] * NUM_SLOTS

    def views(self, number: int) -> list[torch.Tensor]:
        """Return the room of a slot on every rank."""
        slot = number % NUM_SLOTS
        made = self._views[slot]
        if made is None:
            group = self._group
            numel = self._shape.numel()
            made = self._views[slot] = [
                segment.view(group.table.room(rank, slot), numel, self._dtype)
                for rank, segment in enumerate(group.segments)
            ]
        return made


def _take_part(group: ShmBackend, call: Call, number: int, plan: _Plan) -> Steps:
    table = group.table
    assert call.output is not None
    tensor = call.output if call.output.ndim == 1 else call.output.view(-1)
    assert call.op is not None
    assert call.reduce_dtype is not None
    while not table.is_free(number):
        yield
    views = plan.views(number)
    views[group.rank].copy_(tensor)
    table.post(number, plan.code, 0, 0)
    group.domain.ring()
    while not table.are_posted(number):
        yield
    table.check_agreement(number)
    if plan.is_plain_pair:
        torch.add(views[0], views[1], out=tensor)
    else:
        group.domain.adder.combine([tensor], views, call.op, call.reduce_dtype)
    # Nobody waits for this, but who uses the slot again.
    table.finish(number)
