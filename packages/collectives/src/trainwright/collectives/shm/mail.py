"""Messages between the ranks of a group.

A sender copies the message into its own segment and leaves a letter in a ring of letters to that
receiver, which copies the message out and marks it as read. Messages that live in shared memory
are not copied by the sender, who then waits until they have been read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives.calls import describe_tensor
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Recv, Send
from trainwright.collectives.shm.domain import Domain
from trainwright.collectives.shm.operation import Operation, Steps
from trainwright.collectives.shm.table import encode_tensor

_NUM_LETTERS = 32
_LETTER_WORDS = 8
# Fields of a letter: its number plus one, written last; then what and where the message is.
_POSTED = 0
_TAG = 1
_DTYPE = 2
_SHAPE = 3
_OFFSET = 4
_STATE = 5
# How the receiver answers, in a word of the sender's segment.
_READ = 1
_REFUSED = 2
_STATE_BYTES = 64
_SMALL_BYTES = 1 << 15
# A sender this far ahead of a receiver waits for it.
_MAX_UNREAD_BYTES = 64 << 20
_TAG_MASK = (1 << 64) - 1


def mail_bytes(size: int) -> int:
    """Return the room for the letters and counts of one rank of a group."""
    return 8 * size * (_NUM_LETTERS * _LETTER_WORDS + 1)


@attrs.define(slots=True, eq=False)
class _Letter:
    dtype: int
    shape: int
    offset: int
    state: int


@attrs.define(slots=True, eq=False)
class _Copy:
    """A message in this rank's segment until it has been read."""

    peer: int
    state: int
    offset: int
    num_bytes: int


class Mail:
    """One rank's letters to and from the others of its group.

    Args:
        domain: the memory.
        rank: this rank in the group.
        ranks: the group's ranks, counted in the domain.
        places: the index of each rank's mail in the 64-bit numbers of its segment.
        name: the group, for messages.
    """

    def __init__(
        self, domain: Domain, rank: int, ranks: Sequence[int], places: Sequence[int], name: str
    ) -> None:
        size = len(ranks)
        self._domain = domain
        self._rank = rank
        self._ranks = ranks
        self._places = places
        self._name = name
        self._words = [domain.segments[member].words for member in ranks]
        self._counts = size * _NUM_LETTERS * _LETTER_WORDS
        self._num_wanted = [0] * size
        self._num_posted = [0] * size
        self._num_taken = [0] * size
        self._unread_bytes = [0] * size
        self._arrived: dict[tuple[int, int], deque[_Letter]] = {}
        self._awaited: dict[tuple[int, int], deque[object]] = {}
        self._copies: deque[_Copy] = deque()

    def post(self, message: Send | Recv) -> Operation:
        """Start one message."""
        steps = self._send(message) if isinstance(message, Send) else self._receive(message)
        member = self._ranks[message.peer]
        is_written = isinstance(message, Recv) and message.tensor.is_inference()
        what = _Description(message)
        operation = Operation(what, self._name, steps, lambda: [member], is_written)
        self._domain.launch(operation)
        return operation

    def _send(self, message: Send) -> Steps:
        tensor = message.tensor
        peer = message.peer
        domain = self._domain
        number = self._num_wanted[peer]
        self._num_wanted[peer] += 1
        while number != self._num_posted[peer] or not self._has_room(peer, number):
            yield
        self._collect_copies()
        num_bytes = tensor.nbytes
        offset = domain.own.find(tensor) if num_bytes > _SMALL_BYTES else None
        kept_bytes = _STATE_BYTES + (num_bytes if offset is None else 0)
        block = domain.arena.take(kept_bytes)
        state = block // 8
        domain.own.words[state] = 0
        is_direct = offset is not None
        if offset is None:
            offset = block + _STATE_BYTES
            domain.own.view(offset, num_bytes, torch.uint8).copy_(flat_bytes(tensor))
        self._write_letter(message, number, offset, state)
        self._unread_bytes[peer] += kept_bytes
        domain.ring()
        copy = _Copy(peer, state, block, kept_bytes)
        if not is_direct and self._unread_bytes[peer] <= _MAX_UNREAD_BYTES:
            self._copies.append(copy)
            return
        while not domain.own.words[state]:
            yield
        answer = domain.own.words[state]
        self._drop(copy)
        if answer == _REFUSED:
            raise UsageError(self._refusal(message, "receives another shape or dtype"))

    def _receive(self, message: Recv) -> Steps:
        key = (message.peer, message.tag & _TAG_MASK)
        queue = self._awaited.setdefault(key, deque())
        ticket = object()
        queue.append(ticket)
        while True:
            letter = self._find_letter(key) if queue[0] is ticket else None
            if letter is not None:
                break
            yield
        queue.popleft()
        if not queue:
            del self._awaited[key]
        domain = self._domain
        segment = domain.segments[self._ranks[message.peer]]
        fits = (letter.dtype, letter.shape) == encode_tensor(message.tensor)
        if fits:
            came = segment.view(letter.offset, message.tensor.nbytes, torch.uint8)
            flat_bytes(message.tensor).copy_(came)
        domain.fence()
        segment.words[letter.state] = _READ if fits else _REFUSED
        domain.ring()
        if not fits:
            raise UsageError(self._refusal(message, "sends another shape or dtype"))

    def _write_letter(self, message: Send, number: int, offset: int, state: int) -> None:
        own = self._words[self._rank]
        place = self._letter_place(self._rank, message.peer, number)
        own[place + _TAG] = message.tag & _TAG_MASK
        own[place + _DTYPE], own[place + _SHAPE] = encode_tensor(message.tensor)
        own[place + _OFFSET] = offset
        own[place + _STATE] = state
        if not self._domain.is_ordered:
            self._domain.fence()
        own[place + _POSTED] = number + 1
        self._num_posted[message.peer] = number + 1

    def _find_letter(self, key: tuple[int, int]) -> _Letter | None:
        """Take all letters of the peer out of the ring; return the oldest of the tag."""
        peer = key[0]
        words = self._words[peer]
        number = self._num_taken[peer]
        place = self._letter_place(peer, self._rank, number)
        while words[place + _POSTED] == number + 1:
            if not self._domain.is_ordered:
                self._domain.fence()
            letter = _Letter(
                words[place + _DTYPE], words[place + _SHAPE],
                words[place + _OFFSET], words[place + _STATE],
            )  # fmt: skip
            self._arrived.setdefault((peer, words[place + _TAG]), deque()).append(letter)
            number += 1
            place = self._letter_place(peer, self._rank, number)
        if number != self._num_taken[peer]:
            self._num_taken[peer] = number
            self._domain.fence()
            self._words[self._rank][self._places[self._rank] + self._counts + peer] = number
            self._domain.ring()
        letters = self._arrived.get(key)
        if not letters:
            return None
        letter = letters.popleft()
        if not letters:
            del self._arrived[key]
        return letter

    def _has_room(self, peer: int, number: int) -> bool:
        taken = self._words[peer][self._places[peer] + self._counts + self._rank]
        return bool(number - taken < _NUM_LETTERS)

    def _letter_place(self, sender: int, receiver: int, number: int) -> int:
        ring = receiver * _NUM_LETTERS + number % _NUM_LETTERS
        return self._places[sender] + ring * _LETTER_WORDS

    def _collect_copies(self) -> None:
        """Reuse the memory of messages that have been read."""
        words = self._domain.own.words
        for _ in range(min(_NUM_LETTERS, len(self._copies))):
            copy = self._copies.popleft()
            if words[copy.state]:
                self._drop(copy)
            else:
                self._copies.append(copy)

    def _drop(self, copy: _Copy) -> None:
        self._unread_bytes[copy.peer] -= copy.num_bytes
        self._domain.arena.give_back(copy.offset, copy.num_bytes)

    def _refusal(self, message: Send | Recv, what: str) -> str:
        return (
            f"{_Description(message)} in {self._name!r}: rank {message.peer} {what} than rank "
            f"{self._rank}'s {describe_tensor(message.tensor)}; they must be alike"
        )


class _Description:
    """Names a message only where it is asked for."""

    def __init__(self, message: Send | Recv) -> None:
        self._message = message

    def __str__(self) -> str:
        message = self._message
        verb = "send" if isinstance(message, Send) else "recv"
        return f"{verb}({describe_tensor(message.tensor)}, peer={message.peer}, tag={message.tag})"


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
