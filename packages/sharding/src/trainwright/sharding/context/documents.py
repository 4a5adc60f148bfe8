"""Sequences that hold several documents, which do not see each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch

from trainwright.sharding.context.memo import Memo
from trainwright.sharding.errors import ShardingError


@attrs.frozen
class Run:
    """Neighbouring positions of one document.

    Args:
        start: The first position.
        stop: The position after the last.
        document: Its number in this sequence.
    """

    start: int
    stop: int
    document: int


@attrs.frozen
class Documents:
    """Which positions of each sequence of a micro-batch may see each other.

    It is made once a micro-batch from whole sequences, before they are split, and is the same on
    all ranks that share them: each then knows what all others need. Passing it instead of numbers
    lets all layers share what follows from it.

    Args:
        length: Positions of each sequence.
        rows: By sequence, its documents as runs, increasing; positions in none are padding, which
            sees nothing and is seen by nobody. Runs of equal number are one document.
        memo: What follows from the documents.
    """

    length: int
    rows: tuple[tuple[Run, ...], ...]
    memo: Memo = attrs.field(factory=Memo, init=False, eq=False, repr=False)

    @classmethod
    def of(cls, ids: torch.Tensor) -> Documents:
        """Return the documents that numbers tell.

        Args:
            ids: Integers [B, S], the document of each position of whole sequences; negative ones
                are padding. Keep them on the CPU: they are read by the host.

        Raises:
            ShardingError: They are not integers of two dims.
        """
        if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
            raise ShardingError(
                "documents are integers [B, S], one number a position of whole sequences, got "
                f"{ids.dtype} of shape {tuple(ids.shape)}"
            )
        return cls(ids.shape[1], tuple(_runs_of(row) for row in ids.cpu()))

    @classmethod
    def from_boundaries(cls, boundaries: Sequence[Sequence[int]], length: int) -> Documents:
        """Return the documents between boundaries, as in a list of cumulative lengths a sequence.

        Args:
            boundaries: By sequence, where each document starts and where the last one ends; what
                is before the first or after the last is padding.
            length: Positions of each sequence.

        Raises:
            ShardingError: Boundaries decrease or leave the sequence.
        """
        rows = []
        for number, edges in enumerate(boundaries):
            steps = list(itertools.pairwise(edges))
            if any(stop < start for start, stop in steps) or any(
                not 0 <= edge <= length for edge in edges
            ):
                raise ShardingError(
                    f"boundaries of sequence {number} must increase within 0..{length}, got "
                    f"{list(edges)}"
                )
            runs = [Run(a, b, index) for index, (a, b) in enumerate(steps) if a < b]
            rows.append(tuple(runs))
        return cls(length, tuple(rows))

    def positions(self) -> torch.Tensor:
        """Return each position counted from the start of its document: int64 [B, S].

        Padding has 0; a document in several runs is counted on. Split it like the tokens.
        """
        found = torch.zeros(len(self.rows), self.length, dtype=torch.int64)
        for row, runs in zip(found, self.rows, strict=True):
            seen: dict[int, int] = {}
            for run in runs:
                before = seen.get(run.document, 0)
                count = run.stop - run.start
                row[run.start : run.stop] = torch.arange(before, before + count)
                seen[run.document] = before + count
        return found

    def select(self, start: int, stop: int) -> Documents:
        """Return those of the sequences ``start`` to ``stop``, such as a micro-batch's."""
        return Documents(self.length, self.rows[start:stop])


def documents_of(given: torch.Tensor | Documents | None) -> Documents | None:
    """Return documents in whichever form they came."""
    return Documents.of(given) if isinstance(given, torch.Tensor) else given


def _runs_of(ids: torch.Tensor) -> tuple[Run, ...]:
    if not ids.numel():
        return ()
    changes = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    starts = [0, *changes.tolist()]
    numbers = ids[torch.tensor(starts)].tolist()
    stops = [*starts[1:], ids.numel()]
    runs = zip(starts, stops, numbers, strict=True)
    return tuple(Run(start, stop, number) for start, stop, number in runs if number >= 0)
