"""Small tensors, with as little between the call and the result as Python allows.

Contributions lie in a few rooms behind the flags of each rank, used in turn; what calls of one kind
need, the views of those rooms among it, is made once and kept. Everybody reads what it needs of all
rooms, so that there is one round, and nobody waits for others to read.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.protocol import ReduceOp, Work
from trainwright.collectives.shm.operation import Operation, ShmWork, Steps
from trainwright.collectives.shm.table import FINISHED, NUM_ROOMS, POSTED, ROOM_BYTES, encode
from trainwright.collectives.works import DONE

if TYPE_CHECKING:
    from trainwright.collectives.shm.group import ShmBackend

_MAX_KEPT = 16
# Beyond this, every rank would read too much that another one could have combined for it.
_MAX_READ_BYTES = 1 << 20

_KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
_Key = tuple[Kind, tuple[int, ...], torch.dtype | None, object, torch.dtype | None]


class Quick:
    """The small all-reduces, reduce-scatters and all-gathers of one group."""

    def __init__(self, group: ShmBackend) -> None:
        self._group = group
        self._plans: dict[_Key, _Plan] = {}
        # The collective that had each room last, and those that wait for it. All ranks must take
        # them in the same order, or each might wait for one that another has put back.
        self._users = [-1] * NUM_ROOMS
        self._waiting: list[deque[int]] = [deque() for _ in range(NUM_ROOMS)]

    def start(self, call: Call, number: int) -> Work | None:
        """Start a collective if it is small; return None if it is not."""
        if call.kind not in _KINDS:
            return None
        key = (call.kind, call.shape, call.dtype, call.op, call.reduce_dtype)
        plan = self._plans.get(key) or self._make(key, call)
        if plan is None:
            return None
        group = self._group
        domain = group.domain
        table = group.table
        pair = _flatten(call)
        is_inference = pair[0].is_inference()
        with domain.lock:
            domain.check()
            self._waiting[number % NUM_ROOMS].append(number)
            is_posted = not is_inference and self._enter(number)
            if is_posted:
                plan.show(pair[1], number)
                if table.are_posted(number) and table.agree(number):
                    plan.finish(pair[0], number)
                    return DONE
            steps = self._steps(plan, pair, number, is_posted)
            missing = partial(table.missing, number)
            operation = Operation(call, group.name, steps, missing, is_inference)
            domain.start_locked(operation)
        return ShmWork(domain, operation, call.timeout_s)

    def _enter(self, number: int) -> bool:
        """Take the room if it is this one's turn and everybody has left."""
        room = number % NUM_ROOMS
        waiting = self._waiting[room]
        user = self._users[room]
        table = self._group.table
        if waiting[0] != number or not table.is_free(number):
            return False
        if user >= 0 and not table.is_over(user):
            return False
        waiting.popleft()
        self._users[room] = number
        return True

    def _steps(
        self, plan: _Plan, pair: tuple[torch.Tensor, torch.Tensor], number: int, is_posted: bool
    ) -> Steps:
        """Yield until the others have come."""
        table = self._group.table
        if not is_posted:
            while not self._enter(number):
                yield
            plan.show(pair[1], number)
        while not table.are_posted(number):
            yield
        table.check_agreement(number)
        plan.finish(pair[0], number)

    def _make(self, key: _Key, call: Call) -> _Plan | None:
        assert call.input is not None
        assert call.output is not None
        num_bytes = call.input.nbytes
        num_read = num_bytes * (1 if call.kind is Kind.REDUCE_SCATTER else self._group.size)
        if num_bytes > ROOM_BYTES or num_read > _MAX_READ_BYTES:
            return None
        if len(self._plans) >= _MAX_KEPT:
            self._plans.clear()
        made = self._plans[key] = _Plan(self._group, call)
        return made


class _Plan:
    """What all calls of one kind, shape, dtype and operation have in common."""

    def __init__(self, group: ShmBackend, call: Call) -> None:
        assert call.input is not None
        assert call.output is not None
        self._group = group
        self._domain = group.domain
        self._table = group.table
        self._code = encode(call)
        self._dtype = call.input.dtype
        self._num_shown = call.input.numel()
        # Where the part of each room begins that this rank needs, and how long it is.
        self._is_scattered = call.kind is Kind.REDUCE_SCATTER
        self._num_needed = call.output.numel() if self._is_scattered else self._num_shown
        self._op = call.op
        self._wide = call.reduce_dtype
        self._is_plain_pair = (
            group.size == 2 and call.op is ReduceOp.SUM and call.reduce_dtype is self._dtype
        )
        self._own: list[torch.Tensor | None] = [None] * NUM_ROOMS
        self._parts: list[list[torch.Tensor]] = [[]] * NUM_ROOMS

    def show(self, source: torch.Tensor, number: int) -> None:
        """Write this rank's contribution."""
        room = number % NUM_ROOMS
        own = self._own[room]
        if own is None:
            own = self._look(room)
        own.copy_(source)
        self._table.post_small(number, self._code)
        self._table.tell(POSTED, number, number + 1)

    def finish(self, output: torch.Tensor, number: int) -> None:
        """Combine or concatenate the contributions of all."""
        parts = self._parts[number % NUM_ROOMS]
        if self._op is None:
            torch.cat(parts, out=output)
        elif self._is_plain_pair:
            torch.add(parts[0], parts[1], out=output)
        else:
            assert self._wide is not None
            self._domain.combiner.combine([output], parts, self._op, self._wide)
        # Nobody waits for this, but who uses the room again.
        self._table.say(FINISHED, number, number + 1)

    def _look(self, room: int) -> torch.Tensor:
        group = self._group
        skipped = group.rank * self._num_needed * self._dtype.itemsize if self._is_scattered else 0
        places = [self._table.room(rank, room) for rank in range(group.size)]
        self._parts[room] = [
            segment.view(place + skipped, self._num_needed, self._dtype)
            for segment, place in zip(group.segments, places, strict=True)
        ]
        own = group.segments[group.rank].view(places[group.rank], self._num_shown, self._dtype)
        self._own[room] = own
        return own


def _flatten(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and input as rows of numbers."""
    output = call.output
    source = call.input
    assert output is not None
    assert source is not None
    flat = output if output.ndim == 1 else output.view(-1)
    if source is output:
        return flat, flat
    return flat, source if source.ndim == 1 else source.view(-1)
