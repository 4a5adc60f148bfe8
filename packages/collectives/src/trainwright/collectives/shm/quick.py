"""Sums of a few numbers, with as little between the call and the sum as Python allows.

The contributions lie in the ranks' tables, next to the flags, where each slot has a little room;
what a call of the same kind needs, the views of that room among it, is made once and kept.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.protocol import ReduceOp, Work
from trainwright.collectives.shm.operation import Operation, ShmWork, Steps
from trainwright.collectives.shm.table import NUM_SLOTS, ROOM_BYTES, encode
from trainwright.collectives.works import DONE

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

_MAX_KEPT = 16

_Key = tuple[torch.Size, torch.dtype | None, object, torch.dtype | None]


class Quick:
    """The small all-reduces of one group."""

    def __init__(self, group: ShmBackend) -> None:
        self._group = group
        self._plans: dict[_Key, _Plan] = {}

    def start(self, call: Call, number: int) -> Work | None:
        """Start an all-reduce if it is small; return None if it is not."""
        tensor = call.output
        if call.kind is not Kind.ALL_REDUCE or tensor is None:
            return None
        key = (tensor.shape, call.dtype, call.op, call.reduce_dtype)
        plan = self._plans.get(key) or self._make(key, call)
        if plan is None:
            return None
        if tensor.ndim != 1:
            tensor = tensor.view(-1)
        group = self._group
        domain = group.domain
        table = group.table
        is_inference = tensor.is_inference()
        with domain.lock:
            domain.check()
            is_posted = not is_inference and table.is_free(number)
            if is_posted:
                plan.show(tensor, number)
                if table.are_posted(number) and table.agree(number):
                    plan.finish(tensor, number)
                    return DONE
            steps = plan.steps(tensor, number, is_posted)
            missing = partial(table.missing, number)
            operation = Operation(call, group.name, steps, missing, is_inference)
            domain.start_locked(operation)
        return ShmWork(domain, operation, call.timeout_s)

    def _make(self, key: _Key, call: Call) -> _Plan | None:
        assert call.output is not None
        if call.output.nbytes > ROOM_BYTES:
            return None
        if len(self._plans) >= _MAX_KEPT:
            self._plans.clear()
        made = self._plans[key] = _Plan(self._group, call)
        return made


class _Plan:
    """What all calls of one shape, dtype and operation have in common."""

    def __init__(self, group: ShmBackend, call: Call) -> None:
        assert call.output is not None
        assert call.op is not None
        assert call.reduce_dtype is not None
        self._group = group
        self._domain = group.domain
        self._table = group.table
        self._rank = group.rank
        self._code = encode(call)
        self._numel = call.output.numel()
        self._dtype = call.output.dtype
        self._op = call.op
        self._wide = call.reduce_dtype
        is_sum = call.op is ReduceOp.SUM and call.reduce_dtype is self._dtype
        self._is_plain_pair = group.size == 2 and is_sum
        self._views: list[list[torch.Tensor] | None] = [None] * NUM_SLOTS

    def show(self, tensor: torch.Tensor, number: int) -> None:
        """Write this rank's numbers."""
        views = self._views[number % NUM_SLOTS] or self._look(number % NUM_SLOTS)
        views[self._rank].copy_(tensor)
        self._table.post_small(number, self._code)
        self._domain.ring()

    def finish(self, tensor: torch.Tensor, number: int) -> None:
        """Combine the numbers of all."""
        views = self._views[number % NUM_SLOTS] or self._look(number % NUM_SLOTS)
        if self._is_plain_pair:
            torch.add(views[0], views[1], out=tensor)
        else:
            self._domain.adder.combine([tensor], views, self._op, self._wide)
        # Nobody waits for this, but who uses the slot again.
        self._table.finish(number)

    def steps(self, tensor: torch.Tensor, number: int, is_posted: bool) -> Steps:
        """Yield until the others have come."""
        table = self._table
        if not is_posted:
            while not table.is_free(number):
                yield
            self.show(tensor, number)
        while not table.are_posted(number):
            yield
        table.check_agreement(number)
        self.finish(tensor, number)

    def _look(self, slot: int) -> list[torch.Tensor]:
        table = self._table
        made = self._views[slot] = [
            segment.view(table.room(rank, slot), self._numel, self._dtype)
            for rank, segment in enumerate(self._group.segments)
        ]
        return made
