"""The one executor of all plans: one exchange of messages a step, then what they bring.

On CPU a step's exchange holds its sends and the receives of the next step: who sends then finds
the receive posted and need not ask for it. What a step brings is waited for with the exchange
before, so its own sends may still be under way while it is combined. Where operations are queued
on a stream, a receive ahead of time would keep the sends behind it from starting; there a step's
exchange holds its own receives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step
from trainwright.collectives.arithmetic import combine
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Recv, ReduceOp, Send, Work
from trainwright.collectives.works import DONE

# Messages of a step that are to be combined, and where they come to lie.
_Arrivals = list[tuple[Part, torch.Tensor]]


class Passage(Protocol):
    """What an algorithm needs of a `Communicator`."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors must live."""
        ...

    def exchange(self, messages: Sequence[Send | Recv]) -> Work:
        """Start all messages together, so that no order among them can deadlock."""
        ...


class Execution:
    """One run of a plan on this rank.

    Args:
        comm: The ranks of the plan.
        plan: This rank's steps.
        source: This rank's flat elements; only read, unless it is ``result``.
        result: Where results go, flat, with as many elements; None where the plan moves none. If
            it is ``source``, and every result ends here, contributions are combined in place.
        op: How contributions are combined.
        dtype: Dtype in which they are.
    """

    def __init__(
        self,
        comm: Passage,
        plan: Plan,
        source: torch.Tensor,
        result: torch.Tensor | None,
        op: ReduceOp,
        dtype: torch.dtype,
    ) -> None:
        if plan.kept_pitch != 1:
            raise UsageError(
                f"{plan.algorithm}: the plan is an all-to-all; run it by all_to_all_by"
            )
        self._comm = comm
        self._plan = plan
        self._source = source
        self._result = result
        self._op = op
        self._dtype = dtype
        self._bounds = plan.bounds(source.numel())
        self._finished = set(range(*plan.given))
        self._combined: list[_Combined] = []
        self._spare: list[torch.Tensor] = []
        self._given_away: list[torch.Tensor] = []
        if result is source and dtype is source.dtype and plan.kept == (0, plan.num_chunks):
            self._combined.append(_Combined(0, plan.num_chunks, source))

    def run(self) -> None:
        """Do all steps, and bring to ``result`` whatever of it ends here."""
        steps = self._plan.steps
        if self._source.device.type == "cpu":
            self._run_ahead(steps)
        else:
            for step in steps:
                arrivals: _Arrivals = []
                self._start([*self._sends(step), *self._receives(step, arrivals)]).wait()
                self._take_in(step, arrivals)
        if self._result is not None:
            self._finish(*self._plan.kept)

    def write(self, start: int, stop: int, target: torch.Tensor) -> None:
        """Write the end result of chunks that were combined here to ``target``, rounded once."""
        for chunk in range(start, stop):
            offset = self._bounds[start]
            cut = slice(self._bounds[chunk] - offset, self._bounds[chunk + 1] - offset)
            self._write_chunk(chunk, target[cut])

    def _run_ahead(self, steps: Sequence[Step]) -> None:
        coming: _Arrivals = []
        before = self._start(self._receives(steps[0], coming) if steps else [])
        for step, following in itertools.zip_longest(steps, steps[1:], fillvalue=Step()):
            arrivals, coming = coming, []
            sends = self._sends(step)
            is_in_use = _sends_what_it_combines(step)
            if is_in_use:
                own = self._start(sends)
                now = self._start(self._receives(following, coming))
            else:
                now = self._start([*sends, *self._receives(following, coming)])
            before.wait()
            if is_in_use:
                own.wait()
            self._take_in(step, arrivals)
            before = now
        before.wait()

    def _start(self, messages: list[Send | Recv]) -> Work:
        return self._comm.exchange(messages) if messages else DONE

    def _sends(self, step: Step) -> list[Send | Recv]:
        return [
            Send(self._leaving(part), part.peer)
            for part in step.sends
            if self._numel(part.start, part.stop) > 0
        ]

    def _receives(self, step: Step, arrivals: _Arrivals) -> list[Send | Recv]:
        """Return what a step receives, and add to ``arrivals`` what is to be combined then."""
        messages: list[Send | Recv] = []
        for part in step.receives:
            if self._numel(part.start, part.stop) > 0:
                buffer = self._arriving(part)
                messages.append(Recv(buffer, part.peer))
                if part.payload is not Payload.RESULT:
                    arrivals.append((part, buffer))
        return messages

    def _take_in(self, step: Step, arrivals: _Arrivals) -> None:
        """Combine what a step has brought, and note what it has given away."""
        # The sends of the step before are over.
        self._spare += self._given_away
        self._given_away = []
        for part in step.sends:
            if part.payload is Payload.PARTIAL:
                self._give_away(part.start, part.stop)
        for part in step.receives:
            if part.payload is Payload.RESULT:
                self._finished.update(range(part.start, part.stop))
        alike: dict[tuple[int, int], list[tuple[int, torch.Tensor]]] = {}
        for part, buffer in arrivals:
            alike.setdefault((part.start, part.stop), []).append((part.peer, buffer))
        for (start, stop), parts in alike.items():
            self._combine(start, stop, parts)

    def _leaving(self, part: Part) -> torch.Tensor:
        cut = self._cut(part.start, part.stop)
        if part.payload is Payload.CONTRIBUTION:
            return self._source[cut]
        if part.payload is Payload.PARTIAL:
            return self._partial(part.start, part.stop)
        assert self._result is not None
        self._finish(part.start, part.stop)
        return self._result[cut]

    def _arriving(self, part: Part) -> torch.Tensor:
        if part.payload is Payload.RESULT:
            assert self._result is not None
            return self._result[self._cut(part.start, part.stop)]
        is_partial = part.payload is Payload.PARTIAL
        dtype = self._dtype if is_partial else self._source.dtype
        return self._take(self._numel(part.start, part.stop), dtype)

    def _combine(self, start: int, stop: int, parts: list[tuple[int, torch.Tensor]]) -> None:
        """Combine what came for these chunks with what is here, in rank order."""
        held = self._find(start, stop)
        buffers = [buffer for _, buffer in parts]
        if held is None:
            own = self._source[self._cut(start, stop)]
            wide = [buffer for buffer in buffers if buffer.dtype is self._dtype]
            total = wide[0] if wide else self._take(own.numel(), self._dtype)
            self._combined.append(_Combined(start, stop, total))
        else:
            own = total = self._view(held, start, stop)
        ordered = sorted([*parts, (self._comm.rank, own)], key=lambda item: item[0])
        op = ReduceOp.SUM if self._op is ReduceOp.AVG else self._op
        combine([total], [tensor for _, tensor in ordered], op, self._dtype)
        self._spare += [buffer for buffer in buffers if buffer is not total]

    def _finish(self, start: int, stop: int) -> None:
        """Bring the end result of the chunks among these that were combined here to its place."""
        assert self._result is not None
        for chunk in range(start, stop):
            if chunk not in self._finished:
                self._finished.add(chunk)
                self._write_chunk(chunk, self._result[self._cut(chunk, chunk + 1)])

    def _write_chunk(self, chunk: int, target: torch.Tensor) -> None:
        total = self._partial(chunk, chunk + 1)
        if self._op is ReduceOp.AVG and self._plan.size > 1:
            # Complex division by a number rounds more than once.
            quotient = torch.view_as_real(total) if total.is_complex() else total
            quotient.div_(self._plan.size)
        if total.data_ptr() != target.data_ptr():
            target.copy_(total)
        self._give_away(chunk, chunk + 1)

    def _partial(self, start: int, stop: int) -> torch.Tensor:
        held = self._find(start, stop)
        if held is None:
            return self._source[self._cut(start, stop)].to(self._dtype)
        return self._view(held, start, stop)

    def _find(self, start: int, stop: int) -> _Combined | None:
        # The last one is the newest, and plans only narrow down what they combine.
        for held in reversed(self._combined):
            if held.start <= start and stop <= held.stop:
                return held
            if start < held.stop and held.start < stop:
                raise UsageError(
                    f"{self._plan.algorithm}: chunks {held.start}..{held.stop} were combined and "
                    f"now {start}..{stop} would be; the plan must go on with all or a part of them"
                )
        return None

    def _give_away(self, start: int, stop: int) -> None:
        """Forget combined chunks, whose memory is free as soon as they are sent."""
        for held in self._combined:
            if (held.start, held.stop) == (start, stop) and held.buffer is not self._source:
                self._combined.remove(held)
                self._given_away.append(held.buffer)
                return

    def _view(self, held: _Combined, start: int, stop: int) -> torch.Tensor:
        offset = self._bounds[held.start]
        return held.buffer[self._bounds[start] - offset : self._bounds[stop] - offset]

    def _take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory to write to: fresh pages cost more than the copy into them."""
        for index, buffer in enumerate(self._spare):
            if buffer.dtype is dtype and buffer.numel() >= numel:
                return self._spare.pop(index)[:numel]
        return torch.empty(numel, dtype=dtype, device=self._source.device)

    def _cut(self, start: int, stop: int) -> slice:
        return slice(self._bounds[start], self._bounds[stop])

    def _numel(self, start: int, stop: int) -> int:
        return self._bounds[stop] - self._bounds[start]


@attrs.define(eq=False)
class _Combined:
    """Chunks of which more than this rank's own contribution is here."""

    start: int
    stop: int
    buffer: torch.Tensor


def _sends_what_it_combines(step: Step) -> bool:
    """Whether chunks that a step sends may be overwritten with what it receives."""
    return any(
        sent.start < come.stop and come.start < sent.stop
        for sent in step.sends
        for come in step.receives
        if come.payload is not Payload.RESULT
    )
