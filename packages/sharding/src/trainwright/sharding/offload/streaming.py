"""Brings the states of units from a file, a few at a time, and puts them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives import Work
from trainwright.sharding.offload.buffers import Buffers, buffer_bytes, cut
from trainwright.sharding.offload.file import FileSlot
from trainwright.sharding.offload.ledger import Ledger
from trainwright.sharding.offload.states import UnitStates


@attrs.frozen(eq=False)
class _Visit:
    """A unit in memory, and what has to be waited for before the next thing is done with it."""

    states: UnitStates
    memory: torch.Tensor
    works: list[Work]

    @property
    def parts(self) -> list[torch.Tensor]:
        """Its masters, its gradients, its states, and memory to work in, as bytes."""
        return cut(self.memory, _sizes(self.states))

    @property
    def masters(self) -> torch.Tensor:
        """The masters as numbers."""
        return self.parts[0].view(self.states.unit.masters.tensor.dtype)

    def wait(self) -> None:
        """Wait until it is read, or written."""
        while self.works:
            self.works.pop(0).wait()


class StatesStream:
    """Updates units one after the other, at most three of them in memory.

    One is updated, the next one is read, the one before is written and its weights go back. Where
    states are made anew, in the first update, nothing is read ahead: their first memory counts.

    Args:
        held: The units.
        ledger: Counts the memory.
    """

    def __init__(self, held: Sequence[UnitStates], ledger: Ledger) -> None:
        self._held = held
        self._ledger = ledger
        self.unit_bytes = max((buffer_bytes(_sizes(states)) for states in held), default=0)
        # Kept from update to update: memory that is new is slow.
        self._buffers = Buffers(self.unit_bytes, ledger)

    def run(self) -> None:
        """Update every unit that has gradients."""
        due = [states for states in self._held if states.has_gradients]
        reads_ahead = all(states.are_complete for states in due)
        buffers = self._buffers
        visits: deque[_Visit] = deque()  # the last may be being read, all before are being written
        try:
            for number, states in enumerate(due):
                if number == 0 or not reads_ahead:
                    self._make_room(visits, buffers, 1)
                    visits.append(_begin(states, buffers.take()))
                visit = visits[-1]
                visit.wait()
                if reads_ahead and number + 1 < len(due):
                    self._make_room(visits, buffers, 2)
                    visits.append(_begin(due[number + 1], buffers.take()))
                self._update(visit)
            self._make_room(visits, buffers, 0)
        finally:
            for visit in visits:  # where something failed
                _leave(visit)
                buffers.drop()

    def _update(self, visit: _Visit) -> None:
        states, unit = visit.states, visit.states.unit
        _, gradients, kept, work = visit.parts
        anew = 0 if states.are_complete else states.num_bytes
        unit.show(visit.masters)
        unit.show_gradients(gradients.view(unit.gradients.tensor.dtype))
        states.bring(kept)
        self._ledger.take(anew)
        try:
            states.step()
            states.gather(kept)
        finally:
            self._ledger.give(anew)
            unit.show_gradients(None)
        assert isinstance(unit.masters, FileSlot)
        visit.works.append(unit.give_back(visit.masters, work))
        visit.works.append(unit.masters.write(visit.masters))
        if isinstance(states.slot, FileSlot):
            visit.works.append(states.slot.write(kept))

    @staticmethod
    def _make_room(visits: deque[_Visit], buffers: Buffers, most: int) -> None:
        while len(visits) > most:
            visit = visits[0]
            visit.wait()
            _leave(visit)
            buffers.give(visits.popleft().memory)


def _begin(states: UnitStates, memory: torch.Tensor) -> _Visit:
    masters, gradients, kept, _ = cut(memory, _sizes(states))
    unit = states.unit
    assert isinstance(unit.masters, FileSlot)
    assert isinstance(unit.gradients, FileSlot)
    works = [unit.masters.read(masters), unit.gradients.read(gradients)]
    if isinstance(states.slot, FileSlot) and states.are_kept:
        works.append(states.slot.read(kept))
    return _Visit(states, memory, works)


def _leave(visit: _Visit) -> None:
    visit.states.unit.show(visit.states.unit.masters.tensor)
    visit.states.let_go()


def _sizes(states: UnitStates) -> tuple[int, int, int, int]:
    unit = states.unit
    masters, gradients = (
        slot.tensor.numel() * slot.tensor.itemsize for slot in (unit.masters, unit.gradients)
    )
    return masters, gradients, states.num_bytes, unit.work_bytes
