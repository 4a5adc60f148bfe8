"""Algorithms as data: what one rank sends and receives in each step.

A tensor's elements, in order, are cut into ``blocks``, and each block into ``pieces``; chunk
``b * pieces + p`` is piece p of block b. A message carries neighbouring chunks, or some at equal
distances. All messages of a step are under way together, and a step needs what the steps before it
have brought.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence

import attrs

from trainwright.collectives.errors import UsageError


class Payload(enum.Enum):
    """What a message holds of its chunks, and so in which dtype they travel."""

    CONTRIBUTION = "contribution"
    """The sender's own elements, in the tensor's dtype."""
    PARTIAL = "partial"
    """What the sender has combined so far, in the dtype of the reduction; the sender gives it away
    and adds to it no more."""
    RESULT = "result"
    """The end result, in the tensor's dtype."""


@attrs.frozen
class Part:
    """One message of a step: chunks ``start`` to ``stop``, to or from ``peer``.

    Where ``count`` is more than 1, as many follow at each further distance of ``pitch`` chunks.
    """

    peer: int
    start: int
    stop: int
    payload: Payload
    count: int = 1
    pitch: int = 0

    def chunks(self) -> Iterator[int]:
        """Yield the chunks in the order in which they travel."""
        for number in range(self.count):
            shift = number * self.pitch
            yield from range(self.start + shift, self.stop + shift)

    @property
    def end(self) -> int:
        """The chunk after the last one."""
        return self.stop + (self.count - 1) * self.pitch


@attrs.frozen
class Step:
    """The messages of one rank in one step."""

    sends: tuple[Part, ...] = ()
    receives: tuple[Part, ...] = ()


@attrs.frozen
class Plan:
    """What ``rank`` of ``size`` ranks does in an algorithm; all ranks have equally many steps.

    Parts received for the same chunks in the same step are combined in rank order, among them the
    rank's own at its own place. Messages between the same two ranks in one step are in the same
    order on both.
    """

    algorithm: str
    rank: int
    size: int
    steps: tuple[Step, ...]
    blocks: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    pieces: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    given: tuple[int, int] = (0, 0)
    """The chunks whose result this rank has at the beginning, as the parts of an all-gather."""
    kept: tuple[int, int] = (0, 0)
    """The chunks whose result this rank has at the end."""
    kept_pitch: int = 1
    """The distance between two of the kept chunks; an all-to-all keeps one of each sender."""
    in_rank_order: bool = False
    """Whether each result is combined at one place, from all contributions in rank order."""

    def __attrs_post_init__(self) -> None:
        """Refuse ranks and chunks that do not exist."""
        check_place(self.algorithm, self.rank, self.size)
        for start, stop in (self.given, self.kept, *((p.start, p.end) for p in self.parts())):
            if not 0 <= start <= stop <= self.num_chunks:
                raise UsageError(
                    f"{self.algorithm}: chunks {start}..{stop} of rank {self.rank} must lie in "
                    f"0..{self.num_chunks}, which are blocks * pieces"
                )
        for part in self.parts():
            check_place(self.algorithm, part.peer, self.size)

    @property
    def num_chunks(self) -> int:
        """The number of chunks that the elements are cut into."""
        return self.blocks * self.pieces

    @property
    def num_messages(self) -> int:
        """The number of messages that this rank sends where no chunk is empty."""
        return sum(len(step.sends) for step in self.steps)

    @property
    def most_messages_a_step(self) -> int:
        """The largest number of messages that this rank sends in one step."""
        return max((len(step.sends) for step in self.steps), default=0)

    def bounds(self, numel: int) -> tuple[int, ...]:
        """Return the ``num_chunks + 1`` ends of the chunks of ``numel`` elements."""
        ends = [0]
        for start, stop in itertools.pairwise(chunk_bounds(numel, self.blocks)):
            ends += [start + end for end in chunk_bounds(stop - start, self.pieces)[1:]]
        return tuple(ends)

    def num_sent(self, numel: int, payload: Payload | None = None) -> int:
        """Return how many of a tensor's elements this rank sends, all or those of one payload."""
        return self._count((p for step in self.steps for p in step.sends), numel, payload)

    def num_received(self, numel: int, payload: Payload | None = None) -> int:
        """Return how many elements this rank receives, all or those of one payload."""
        return self._count((p for step in self.steps for p in step.receives), numel, payload)

    def part_numel(self, part: Part, numel: int) -> int:
        """Return how many of a tensor's elements a message holds."""
        shifts = range(0, part.count * part.pitch, part.pitch) if part.count > 1 else (0,)
        return sum(
            self._end_of(part.stop + shift, numel) - self._end_of(part.start + shift, numel)
            for shift in shifts
        )

    def parts(self) -> Iterator[Part]:
        """Yield all messages, step by step."""
        for step in self.steps:
            yield from step.sends
            yield from step.receives

    def _end_of(self, num_chunks: int, numel: int) -> int:
        """Return how many elements the first chunks have: one of `bounds`, without the others."""
        block, piece = divmod(num_chunks, self.pieces)
        each, longer = divmod(numel, self.blocks)
        start = block * each + min(block, longer)
        if not piece:
            return start
        each_piece, longer_pieces = divmod(each + (block < longer), self.pieces)
        return start + piece * each_piece + min(piece, longer_pieces)

    def _count(self, parts: Iterable[Part], numel: int, payload: Payload | None) -> int:
        counted = (part for part in parts if payload in (None, part.payload))
        return sum(self.part_numel(part, numel) for part in counted)


def chunk_bounds(numel: int, size: int) -> tuple[int, ...]:
    """Return the ``size + 1`` ends of ``size`` chunks of ``numel`` elements.

    Chunks differ by at most one element; the first ``numel % size`` are the longer ones. Chunk r,
    elements ``bounds[r]`` to ``bounds[r + 1]``, is what rank r reduces and contributes.
    """
    each, longer = divmod(numel, size)
    return tuple(rank * each + min(rank, longer) for rank in range(size + 1))


def check_place(what: str, rank: int, size: int) -> None:
    """Refuse a rank outside of the world.

    Raises:
        UsageError: ``rank`` is not one of ``0`` to ``size - 1``.
    """
    if not 0 <= rank < size:
        raise UsageError(f"{what}: rank={rank} is not one of {size}; they are 0..{size - 1}")


def side_by_side(*tracks: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps that do the steps of all ``tracks`` at the same time."""
    return tuple(
        Step(
            tuple(part for step in together for part in step.sends),
            tuple(part for step in together for part in step.receives),
        )
        for together in itertools.zip_longest(*tracks, fillvalue=Step())
    )
