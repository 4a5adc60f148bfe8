"""The Work of a recorded operation: it completes the record, and compares messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from trainwright.collectives.errors import CollectiveError, UsageError
from trainwright.collectives.flight import Record
from trainwright.collectives.protocol import Work


class Proof(Protocol):
    """Something that shows that both ends of a message are alike."""

    def settle(self, timeout_s: float | None) -> None:
        """Wait for it; raise where they do not."""
        ...

    def is_done(self, within_s: float) -> bool:
        """Return whether `settle` would not wait."""
        ...


class Block:
    """A ``coalesce`` block; while it is open nothing inside may be waited for."""

    __slots__ = ("error", "is_open", "works")

    def __init__(self) -> None:
        self.error: UsageError | None = None
        self.is_open = True
        self.works: list[RecordedWork] = []


class RecordedWork:
    """A Work that tells its records when it is over.

    Args:
        work: The operation.
        records: What it consists of.
        proofs: What to settle before it is waited for.
        explain: Returns what to raise for an error.
        block: The ``coalesce`` block that it belongs to, if any.
        to_keep: Works that end together with it.
    """

    __slots__ = ("_block", "_explain", "_is_over", "_proofs", "_records", "_to_keep", "_work")

    def __init__(
        self,
        work: Work,
        records: Sequence[Record],
        proofs: Sequence[Proof],
        explain: Callable[[CollectiveError, Sequence[Record]], CollectiveError],
        block: Block | None,
        to_keep: Sequence[Work] = (),
    ) -> None:
        self._work = work
        self._records = records
        self._proofs = proofs
        self._explain = explain
        self._block = block
        self._to_keep = to_keep
        self._is_over = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Compare what its messages are, then wait for the operation."""
        if self._block is not None and self._block.is_open:
            self._work.wait(timeout_s)  # which raises
        if self._is_over:
            return
        try:
            for proof in self._proofs:
                proof.settle(timeout_s)
            self._work.wait(timeout_s)
            for work in self._to_keep:
                work.wait(timeout_s)
        except CollectiveError as error:
            raise self._explain(error, self._records) from error.__cause__
        now_s = time.time()
        for record in self._records:
            record.finished_s = now_s
        self._proofs = self._to_keep = ()
        self._is_over = True

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether ``wait`` would not block."""
        if self._is_over:
            return True
        if self._block is not None and self._block.is_open:
            return False
        deadline = time.monotonic() + within_s
        for proof in self._proofs:
            if not proof.is_done(max(0.0, deadline - time.monotonic())):
                return False
        return self._work.is_done(max(0.0, deadline - time.monotonic()))


class RecordedBlock:
    """The Work of a ``coalesce`` block of recorded operations."""

    __slots__ = ("_block", "_work")

    def __init__(self, work: Work, block: Block) -> None:
        self._work = work
        self._block = block

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for each operation of the block."""
        if self._block.is_open:
            self._work.wait(timeout_s)  # which raises
        for work in self._block.works:
            work.wait(timeout_s)
        self._work.wait(timeout_s)

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether each of them is done."""
        if self._block.is_open:
            return False
        deadline = time.monotonic() + within_s
        return all(
            work.is_done(max(0.0, deadline - time.monotonic())) for work in self._block.works
        )
