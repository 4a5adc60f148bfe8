"""The flags of one group: what every rank says about its current collectives.

Each rank has a table in its own segment, which it writes and the others read: a slot a collective,
used again when everybody has finished with the one that had it before. A slot begins with the
number of the collective plus one, written last, when all else is in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainwright.collectives.calls import Call, Kind, describe_dtype
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import ReduceOp
from trainwright.collectives.shm.domain import Domain

NUM_SLOTS = 64
_SLOT_WORDS = 16
# Small contributions lie in rooms behind the slots.
NUM_ROOMS = 8
ROOM_BYTES = 1 << 18
_FLAG_BYTES = NUM_SLOTS * _SLOT_WORDS * 8
# A room for what each rank contributes, and one for what it has computed for all.
TABLE_BYTES = _FLAG_BYTES + 2 * NUM_ROOMS * ROOM_BYTES

# Fields of a slot. STAGED, REDUCED and TAKEN count pieces of large tensors; ANSWER is the number of
# the collective plus one once this rank has computed for all.
POSTED = 0
_CODE = 1
_SHAPE = 2
OFFSET = 3
IS_DIRECT = 4
STAGED = 5
REDUCED = 6
TAKEN = 7
FINISHED = 8
ANSWER = 9

_KINDS = tuple(Kind)
_OPS = tuple(ReduceOp)
_DTYPES = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)


class Table:
    """One rank's view of the tables of its group.

    Args:
        domain: the memory.
        rank: this rank in the group.
        ranks: the group's ranks, counted in the domain.
        places: the index of each rank's table in the 64-bit numbers of its segment.
        name: the group, for messages.

    ``places`` is what was given; ``bells`` wake the others of the group.
    """

    def __init__(
        self, domain: Domain, rank: int, ranks: Sequence[int], places: Sequence[int], name: str
    ) -> None:
        self._name = name
        self._domain = domain
        self._rank = rank
        self._ranks = ranks
        self.places = tuple(places)
        self._tables = [
            (domain.segments[member].words, place)
            for member, place in zip(ranks, places, strict=True)
        ]
        self._own, self._place = self._tables[rank]
        self._others = [entry for here, entry in enumerate(self._tables) if here != rank]
        self.bells = domain.bells_of(ranks)
        self._is_ordered = domain.is_ordered
        # All collectives below this number are over: no need to look again.
        self._num_over = 0
        domain.tables[name] = self

    def is_free(self, number: int) -> bool:
        """Whether all, this rank too, have finished the collective that had the slot before."""
        if number < NUM_SLOTS:
            return True
        return self.is_over(number - NUM_SLOTS)

    def is_over(self, number: int) -> bool:
        """Whether all, this rank too, have finished a collective."""
        while self._num_over <= number:
            first = self._num_over
            if self.read(self._rank, FINISHED, first) <= first or not self.are_finished(first):
                break
            self._num_over += 1
        if number < self._num_over:
            return True
        return self.read(self._rank, FINISHED, number) > number and self.are_finished(number)

    def post(self, number: int, code: tuple[int, int], offset: int, direct_pieces: int) -> None:
        """Show what this rank contributes; ``direct_pieces`` > 0: the tensor itself, whole."""
        own = self._own
        place = self._place + (number % NUM_SLOTS) * _SLOT_WORDS
        own[place + _CODE], own[place + _SHAPE] = code
        own[place + OFFSET] = offset
        own[place + IS_DIRECT] = direct_pieces > 0
        own[place + STAGED] = direct_pieces
        own[place + REDUCED] = 0
        own[place + TAKEN] = 0
        self._write(place + POSTED, number + 1)

    def post_small(self, number: int, code: tuple[int, int]) -> None:
        """Show that what this rank contributes lies in the room whose turn it is."""
        own = self._own
        place = self._place + (number % NUM_SLOTS) * _SLOT_WORDS
        own[place + _CODE], own[place + _SHAPE] = code
        self._write(place + POSTED, number + 1)

    def say(self, field: int, number: int, value: int) -> None:
        """Change one field of this rank's slot."""
        self._write(self._place + (number % NUM_SLOTS) * _SLOT_WORDS + field, value)

    def tell(self, field: int, number: int, value: int) -> None:
        """Change one field, and wake the others if all of them have come to this value.

        Whoever waits for a value on all the others has come to it itself: before the last one has,
        nobody can go on, and being woken in vain costs as much as the work.
        """
        self.say(field, number, value)
        self._domain.progress()
        if self.have(field, number, value):
            self._domain.ring(self.bells)

    def finish(self, number: int) -> None:
        """Say that this rank reads and writes nothing of the others any more."""
        self.tell(FINISHED, number, number + 1)

    def are_posted(self, number: int) -> bool:
        """Whether all the others have started this collective."""
        return self.have(POSTED, number, number + 1)

    def are_finished(self, number: int) -> bool:
        """Whether all the others have finished this collective."""
        return self.have(FINISHED, number, number + 1)

    def have(self, field: int, number: int, value: int) -> bool:
        """Whether a field has come to a value in the slots of all the others."""
        shift = (number % NUM_SLOTS) * _SLOT_WORDS + field
        for words, place in self._others:
            if words[place + shift] < value:
                return False
        if not self._is_ordered:
            self._domain.fence()
        return True

    def read(self, rank: int, field: int, number: int) -> int:
        """Return a field of the slot of one rank."""
        words, place = self._tables[rank]
        return int(words[place + (number % NUM_SLOTS) * _SLOT_WORDS + field])

    def find_answer(self, number: int) -> int | None:
        """Return one of the others that has computed for all, if any has."""
        shift = (number % NUM_SLOTS) * _SLOT_WORDS + ANSWER
        for rank, (words, place) in enumerate(self._tables):
            if words[place + shift] > number and rank != self._rank:
                if not self._is_ordered:
                    self._domain.fence()
                return rank
        return None

    def agree(self, number: int) -> bool:
        """Whether all ranks have posted the same operation, of the same shape."""
        shift = (number % NUM_SLOTS) * _SLOT_WORDS
        code = self._own[self._place + shift + _CODE]
        shape = self._own[self._place + shift + _SHAPE]
        for words, place in self._others:
            if words[place + shift + _CODE] != code or words[place + shift + _SHAPE] != shape:
                return False
        return True

    def check_agreement(self, number: int) -> None:
        """Raise on every rank alike where they have posted different operations or shapes."""
        if self.agree(number):
            return
        text = self._describe(number)
        self.finish(number)
        self._domain.ring()
        raise UsageError(
            f"collective {number} of {self._name!r} differs between ranks: {text}. All ranks must "
            "call the same operations in the same order with the same shapes, dtypes and arguments"
        )

    def missing(self, number: int) -> list[int]:
        """Return the ranks, counted in the domain, that this rank waits for."""
        for field, value in (
            (FINISHED, number - NUM_SLOTS + 1), (POSTED, number + 1), (FINISHED, number + 1)
        ):  # fmt: skip
            late = [
                member
                for rank, member in enumerate(self._ranks)
                if rank != self._rank and self.read(rank, field, number) < value
            ]
            if late:
                return late
        return []

    def describe_progress(self) -> str:
        """Say how many collectives each rank has started and finished."""
        ranks = range(len(self._ranks))
        started, finished = (
            [max(self.read(rank, field, number) for number in range(NUM_SLOTS)) for rank in ranks]
            for field in (POSTED, FINISHED)
        )
        return f"collectives started by each rank: {started}, finished: {finished}"

    def _describe(self, number: int) -> str:
        texts = []
        for rank, member in enumerate(self._ranks):
            name = self._domain.names[member]
            who = f"rank {rank}" if rank == name else f"rank {rank} (world rank {name})"
            code = self.read(rank, _CODE, number)
            numel = self.read(rank, _SHAPE, number) >> 32
            texts.append(f"{who} called {_decode(code, numel)}")
        return "; ".join(texts)

    def _write(self, index: int, value: int) -> None:
        if not self._is_ordered:
            self._domain.fence()
        self._own[index] = value


def room(place: int, number: int, is_answer: bool = False) -> int:
    """Return where one of the rooms behind the table at ``place`` is in the segment, in bytes."""
    return place * 8 + _FLAG_BYTES + (number + NUM_ROOMS * is_answer) * ROOM_BYTES


def encode(call: Call) -> tuple[int, int]:
    """Return two numbers that are alike for calls that belong together."""
    code = _KINDS.index(call.kind)
    code |= (0 if call.op is None else _OPS.index(call.op) + 1) << 8
    code |= (0 if call.dtype is None else _DTYPES.index(call.dtype) + 1) << 16
    code |= (0 if call.reduce_dtype is None else _DTYPES.index(call.reduce_dtype) + 1) << 24
    code |= (0 if call.root is None else call.root + 1) << 32
    return code, _encode_shape(call.shape)


def encode_tensor(tensor: torch.Tensor) -> tuple[int, int]:
    """Return two numbers that are alike for tensors of one dtype and shape."""
    return _DTYPES.index(tensor.dtype), _encode_shape(tensor.shape)


def _encode_shape(shape: Sequence[int]) -> int:
    numel = 1
    mixed = 0
    for length in shape:
        numel *= length
        mixed = (mixed * 1_000_003 + length + 1) & 0xFFFFFFFF
    return (numel & 0xFFFFFFFF) << 32 | mixed


def _decode(code: int, numel: int) -> str:
    parts = []
    if code >> 16 & 0xFF:
        parts.append(f"{describe_dtype(_DTYPES[(code >> 16 & 0xFF) - 1])}, {numel} elements")
    if code >> 8 & 0xFF:
        parts.append(_OPS[(code >> 8 & 0xFF) - 1].name)
    if code >> 24 & 0xFF and code >> 24 & 0xFF != code >> 16 & 0xFF:
        parts.append(f"reduce_dtype={describe_dtype(_DTYPES[(code >> 24 & 0xFF) - 1])}")
    if code >> 32:
        parts.append(f"root={(code >> 32) - 1}")
    return f"{_KINDS[code & 0xFF].value}({', '.join(parts)})"
