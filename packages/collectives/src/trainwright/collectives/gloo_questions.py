"""How ranks that wait for a collective find out that others have called something else.

They use the store, for messages of calls that differ never meet. A rank that has waited for long
writes down what it called under the number of the collective, unless another has, and that it did.
Others that are stuck as well look up what was asked since, and compare it with what they called
under that number. All of this is a few operations of the store a rank, however many ranks there
are, and none while collectives go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import attrs

from trainwright.collectives.rendezvous import Store

# How many notes a group keeps; later ones take the places of old ones.
_NUM_KEPT = 1024
_COUNTER = "asked"


@attrs.frozen
class Note:
    """What a rank has called; ``number`` counts the group's collectives."""

    number: int
    rank: int
    called: str

    def differs_from(self, other: Note) -> bool:
        """Whether the two are calls of one collective that do not fit each other."""
        return self.number == other.number and self.called != other.called


class Questions:
    """The notes of one group.

    Args:
        store: a part of a store for these notes only.
        rank: this rank in the group.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._last_asked = -1
        self._num_read = 0
        self._open: set[int] = set()

    def ask(self, number: int, called: str) -> tuple[Note, Note] | None:
        """Write down what this rank has called, once; return that and a note that differs."""
        if number == self._last_asked:
            return None
        mine = Note(number, self._rank, called)
        written = self._write(mine)
        self._last_asked = number
        if written == mine:
            count = self._store.add(_COUNTER, 1)
            self._store.set(_place(_COUNTER, count), str(number))
        return (written, mine) if written.differs_from(mine) else None

    def answer(
        self, recall: Callable[[int], str | None], num_started: int
    ) -> tuple[Note, Note] | None:
        """Compare what others have asked with what this rank has called.

        Args:
            recall: returns what this rank has called under a number, None where it is not known.
            num_started: how many collectives this rank has started.
        """
        self._read()
        for number in sorted(self._open):
            called = recall(number)
            if called is None and number >= num_started:
                continue
            self._open.discard(number)
            if called is not None:
                mine = Note(number, self._rank, called)
                asked = _parse(self._store.get(_place("call", number)))
                if asked.differs_from(mine):
                    return asked, mine
        return None

    def _write(self, mine: Note) -> Note:
        key = _place("call", mine.number)
        text = json.dumps(attrs.astuple(mine))
        there = self._store.compare_set(key, "", text)
        if _parse(there).number < mine.number:
            there = self._store.compare_set(key, there.decode(), text)
        return _parse(there)

    def _read(self) -> None:
        # Keys are looked for before they are read, since reading waits until they are there.
        if not self._store.check([_COUNTER]):
            return
        count = int(self._store.get(_COUNTER))
        self._num_read = max(self._num_read, count - _NUM_KEPT)
        while self._num_read < count:
            key = _place(_COUNTER, self._num_read + 1)
            if not self._store.check([key]):
                return
            self._open.add(int(self._store.get(key)))
            self._num_read += 1


def _place(kind: str, number: int) -> str:
    return f"{kind}/{number % _NUM_KEPT}"


def _parse(text: bytes) -> Note:
    return Note(*json.loads(text))
