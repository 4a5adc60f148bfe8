"""Small tensors, with as little between the call and the result as Python allows.

Contributions lie in a few rooms behind the flags of each rank, used in turn; what calls of one kind
need, the views of those rooms among it, is made once and kept. There is one round, and nobody waits
for others to read: everybody reads what it needs of all rooms; but of three ranks or more, the one
that comes last to an all-reduce computes it for all, who sleep meanwhile and read its answer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from trainwright.collectives.calls import Call, Kind
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import ReduceOp, Work
from trainwright.collectives.shm.table import (
    ANSWER,
    FINISHED,
    NUM_ROOMS,
    POSTED,
    ROOM_BYTES,
    encode,
    room,
)
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
        self.group = group
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
        turn = _Turn(self, plan, call, number)
        domain = self.group.domain
        with domain.lock:
            domain.check()
            self._waiting[number % NUM_ROOMS].append(number)
            domain.start_locked(turn)
        return DONE if turn.is_over and turn.error is None else turn

    def enter(self, number: int) -> bool:
        """Take the room if it is this one's turn and everybody has left."""
        here = number % NUM_ROOMS
        waiting = self._waiting[here]
        user = self._users[here]
        table = self.group.table
        if waiting[0] != number or not table.is_free(number):
            return False
        if user >= 0 and not table.is_over(user):
            return False
        waiting.popleft()
        self._users[here] = number
        return True

    def _make(self, key: _Key, call: Call) -> _Plan | None:
        assert call.input is not None
        assert call.output is not None
        num_bytes = call.input.nbytes
        num_read = num_bytes * (1 if call.kind is Kind.REDUCE_SCATTER else self.group.size)
        if num_bytes > ROOM_BYTES or num_read > _MAX_READ_BYTES:
            return None
        if len(self._plans) >= _MAX_KEPT:
            self._plans.clear()
        made = self._plans[key] = _Plan(self.group, call)
        return made


class _Turn:
    """One collective under way, and the Work that waits for it."""

    __slots__ = (
        "_is_entered", "_is_inference", "_number", "_output", "_plan", "_quick", "_source",
        "_timeout_s", "error", "group_name", "is_over", "what",
    )  # fmt: skip

    def __init__(self, quick: Quick, plan: _Plan, call: Call, number: int) -> None:
        output, source = call.output, call.input
        assert output is not None
        assert source is not None
        self._output = output if output.ndim == 1 else output.view(-1)
        self._source = source if source.ndim == 1 else source.view(-1)
        self._quick = quick
        self._plan = plan
        self._number = number
        self._is_entered = False
        # Only inference mode may write such a tensor.
        self._is_inference = output.is_inference()
        self._timeout_s = call.timeout_s
        self.what: object = call
        self.group_name = quick.group.name
        self.error: Exception | None = None
        self.is_over = False

    def advance(self) -> Exception | None:
        """Go on as far as possible; return an error that the peers cannot know of, if any."""
        if self.is_over:
            return None
        try:
            if self._is_inference:
                with torch.inference_mode():
                    self._go_on()
            else:
                self._go_on()
        except Exception as error:
            self.error = error
            self.is_over = True
            if not isinstance(error, UsageError):
                return error
        return None

    def missing(self) -> list[int]:
        """Return the ranks, counted in the world, that it waits for."""
        return self._quick.group.table.missing(self._number)

    def wait(self, timeout_s: float | None = None) -> None:
        """Take part until the operation is over."""
        if not self.is_over:
            self._quick.group.domain.wait(self, timeout_s or self._timeout_s)
        if self.error is not None:
            raise self.error

    def is_done(self, within_s: float = 0.0) -> bool:
        """Take part for a while; return whether the operation is over."""
        return self.is_over or self._quick.group.domain.pursue(self, within_s)

    def _go_on(self) -> None:
        number = self._number
        if self._is_entered:
            self.is_over = self._plan.finish(self._output, number)
        elif self._quick.enter(number):
            self._is_entered = True
            self.is_over = self._plan.show(self._output, self._source, number)


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
        self._is_plain = call.op is ReduceOp.SUM and call.reduce_dtype is self._dtype
        self._is_for_all = group.size > 2 and call.kind is Kind.ALL_REDUCE
        self._own: list[torch.Tensor | None] = [None] * NUM_ROOMS
        self._parts: list[list[torch.Tensor]] = [[]] * NUM_ROOMS
        self._answers: list[list[torch.Tensor]] = [[]] * NUM_ROOMS

    def show(self, output: torch.Tensor, source: torch.Tensor, number: int) -> bool:
        """Write this rank's contribution; return whether the collective is over thereby."""
        turn = number % NUM_ROOMS
        own = self._own[turn]
        if own is None:
            own = self._look(turn)
        own.copy_(source)
        table = self._table
        table.post_small(number, self._code)
        if not self._is_for_all:
            table.tell(POSTED, number, number + 1)
            return self.finish(output, number)
        self._domain.progress()
        if not table.are_posted(number):
            return False
        # Two ranks may both find that they are the last: their answers are alike.
        table.check_agreement(number)
        answer = self._answers[turn][self._group.rank]
        self._combine(answer, self._parts[turn])
        table.say(ANSWER, number, number + 1)
        self._domain.ring(table.bells)
        output.copy_(answer)
        table.say(FINISHED, number, number + 1)
        return True

    def finish(self, output: torch.Tensor, number: int) -> bool:
        """Write the result of what all have contributed; return False if it is not there yet."""
        table = self._table
        turn = number % NUM_ROOMS
        if self._is_for_all:
            rank = table.find_answer(number)
            if rank is None:
                if table.are_posted(number):
                    table.check_agreement(number)
                return False
            output.copy_(self._answers[turn][rank])
        else:
            if not table.are_posted(number):
                return False
            table.check_agreement(number)
            if self._op is None:
                torch.cat(self._parts[turn], out=output)
            else:
                self._combine(output, self._parts[turn])
        # Nobody waits for this, but who uses the room again.
        table.say(FINISHED, number, number + 1)
        return True

    def _combine(self, output: torch.Tensor, parts: list[torch.Tensor]) -> None:
        if self._is_plain:
            torch.add(parts[0], parts[1], out=output)
            for part in parts[2:]:
                torch.add(output, part, out=output)
            return
        assert self._op is not None
        assert self._wide is not None
        self._domain.combiner.combine([output], parts, self._op, self._wide)

    def _look(self, turn: int) -> torch.Tensor:
        group = self._group
        tables = self._table.places
        skipped = group.rank * self._num_needed * self._dtype.itemsize if self._is_scattered else 0
        places = [room(place, turn) for place in tables]
        self._parts[turn] = [
            segment.view(place + skipped, self._num_needed, self._dtype)
            for segment, place in zip(group.segments, places, strict=True)
        ]
        if self._is_for_all:
            self._answers[turn] = [
                segment.view(room(place, turn, True), self._num_needed, self._dtype)
                for segment, place in zip(group.segments, tables, strict=True)
            ]
        own = group.segments[group.rank].view(places[group.rank], self._num_shown, self._dtype)
        self._own[turn] = own
        return own
