"""Comparing what ranks are about to do, so that calls that differ raise instead of hanging."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerFailedError,
    UsageError,
)
from trainwright.collectives.flight import Record
from trainwright.collectives.headers import (
    Header,
    blank_headers,
    digest_of,
    tell_groups,
)
from trainwright.collectives.protocol import Communicator, Recv, Send, Work

# Calls nobody waited for are compared once there are this many of them.
_MAX_PENDING = 512

_MARK = "ranks called different operations"
_RULE = (
    "All ranks must call the same operations in the same order with the same shapes, dtypes and "
    "arguments"
)


@attrs.define(eq=False)
class _Posted:
    """A collective whose signature is under way; row r of ``table`` is what rank r called."""

    record: Record
    table: torch.Tensor
    headers: list[torch.Tensor]
    rows_in: Sequence[int] | None
    work: Work
    timeout_s: float | None


@attrs.frozen(eq=False)
class CallProof:
    """Shows that all ranks have called the same collective."""

    verifier: Verifier
    posted: _Posted

    def settle(self, timeout_s: float | None) -> None:
        """Wait for the signatures of all ranks and compare them."""
        self.verifier.settle(self.posted, timeout_s)

    def is_done(self, within_s: float) -> bool:
        """Return whether all ranks have come as far as this call, or cannot any more."""
        return self.verifier.is_done(self.posted, within_s)


class Verifier:
    """Sends the signature of each operation ahead of it and compares those of the other ranks.

    Args:
        calls: A communicator of the same ranks in the same order, for nothing else.
        messages: Another one.
        name: The name of the communicator that is verified.

    Communicates:
        For a collective 256 bytes to and from every other rank, (n-1) messages; for a message
        256 bytes beside it. Nothing waits for a peer before the operation itself is waited for.
    """

    def __init__(self, calls: Communicator, messages: Communicator, name: str) -> None:
        self.calls = calls
        self._messages = messages
        self._name = name
        self._pending: deque[_Posted] = deque()
        self._known: list[Header | None] = [None] * calls.size
        self._broken: str | None = None

    def post(
        self,
        record: Record,
        rows_out: Sequence[int] | None,
        rows_in: Sequence[int] | None,
        timeout_s: float | None,
    ) -> CallProof:
        """Tell the others what this rank has called.

        Args:
            record: The collective.
            rows_out: Of an all-to-all, how many rows go to each rank.
            rows_in: Of an all-to-all, how many rows come from each rank.
            timeout_s: How long its ``wait`` waits for the others.
        """
        self.check()
        if len(self._pending) >= _MAX_PENDING:
            self.settle(self._pending[0], None)
        comm = self.calls
        signature = record.signature
        digest = digest_of(signature)
        table = blank_headers(comm.size, comm.device)
        headers: list[torch.Tensor] = []
        messages: list[Send | Recv] = []
        for peer in range(comm.size):
            if rows_out is not None or not headers:
                rows = 0 if rows_out is None else rows_out[peer]
                headers.append(Header(digest, str(record), rows).to_tensor(comm.device))
            if peer == comm.rank:
                table[peer] = headers[-1]
            else:
                messages += [Send(headers[-1], peer), Recv(table[peer], peer)]
        work = comm.exchange(messages)
        posted = _Posted(record, table, headers, rows_in, work, timeout_s)
        self._pending.append(posted)
        return CallProof(self, posted)

    def translate(self, error: CollectiveError) -> CollectiveError:
        """Return the error that the other ranks raise, where a peer was faster to tell of it."""
        if isinstance(error, PeerFailedError) and _MARK in error.cause:
            self._broken = error.cause
            return UsageError(error.cause)
        return error

    def check(self) -> None:
        """Raise again what an earlier comparison found."""
        if self._broken is not None:
            raise UsageError(self._broken)

    def is_done(self, posted: _Posted, within_s: float) -> bool:
        """Return whether all ranks have come as far as this call."""
        return self._broken is not None or posted.work.is_done(within_s)

    def settle(self, posted: _Posted, timeout_s: float | None) -> None:
        """Wait for the signatures up to this call and compare them.

        Raises:
            UsageError: Ranks called different things; the same text on every rank.
            CollectiveTimeoutError: Ranks have not come; the text names them.
        """
        self.check()
        while self._pending and self._pending[0].record.number <= posted.record.number:
            first = self._pending[0]
            try:
                first.work.wait(timeout_s or first.timeout_s)
            except CollectiveTimeoutError as error:
                self._explain_timeout(first, error)
            self._pending.popleft()
            self._compare(first)

    def send(self, record: Record) -> Work:
        """Send the signature of a message ahead of it."""
        assert record.peer is not None
        header = Header(_digest_of_message(record), str(record)).to_tensor(self._messages.device)
        return self._messages.send(header, record.peer, record.tag or 0)

    def recv(self, record: Record, timeout_s: float | None) -> ExpectedMessage:
        """Start to receive the signature of a message."""
        assert record.peer is not None
        header = blank_headers(1, self._messages.device)[0]
        work = self._messages.recv(header, record.peer, record.tag or 0)
        return ExpectedMessage(record, header, work, timeout_s, self._messages.rank)

    def _compare(self, posted: _Posted) -> None:
        table = posted.table.cpu()
        headers = [Header.from_tensor(row) for row in table]
        self._known = headers
        came = {rank: header for rank, header in enumerate(headers) if header is not None}
        if len({header.digest for header in came.values()}) > 1:
            said = tell_groups({rank: header.text for rank, header in came.items()})
            self._broken = f"{self._name!r}: {_MARK}: {said}. {_RULE}"
            raise DisagreementError(self._broken)
        for rank, rows in enumerate(posted.rows_in or ()):
            if rank in came and came[rank].number != rows:
                self._broken = (
                    f"{self._name!r}: {posted.record}: rank {rank} sends {came[rank].number} rows "
                    f"to rank {self.calls.rank}, which expects {rows}; input_splits and "
                    "output_splits must agree"
                )
                raise DisagreementError(self._broken)

    def _explain_timeout(self, posted: _Posted, error: CollectiveTimeoutError) -> None:
        headers = [Header.from_tensor(row) for row in posted.table.cpu()]
        missing = [rank for rank, header in enumerate(headers) if header is None]
        if not missing:
            raise error
        last = {
            rank: "came last to " + ("nothing" if known is None else known.text)
            for rank, known in enumerate(self._known)
            if rank in missing
        }
        here = {
            rank: f"came to {header.text}"
            for rank, header in enumerate(headers)
            if header is not None and rank != self.calls.rank
        }
        told = tell_groups(last) + (f". Of the others, {tell_groups(here)}" if here else "")
        names = ", ".join(f"rank {rank}" for rank in missing)
        raise CollectiveTimeoutError(
            f"rank {self.calls.rank} of {self._name!r} gave up on {posted.record}; missing: "
            f"{names}. {told[0].upper()}{told[1:]}"
        ) from error


def make_verifier(comm: Communicator, verify: bool | Communicator) -> Verifier:
    """Return a verifier of ``comm`` over a communicator of the same ranks, or splits of ``comm``.

    Communicates:
        One split of it, or two of ``comm``; all ranks together.
    """
    calls = comm.split(0, comm.rank) if isinstance(verify, bool) else verify
    assert calls is not None
    if (calls.rank, calls.size) != (comm.rank, comm.size):
        raise UsageError(
            f"Recorded: verify={calls!r} is rank {calls.rank} of {calls.size} and {comm.name!r} is "
            f"rank {comm.rank} of {comm.size}; pass a communicator of the same ranks in the same "
            "order, or True"
        )
    messages = calls.split(0, calls.rank)
    assert messages is not None
    return Verifier(calls, messages, comm.name)


class DisagreementError(UsageError):
    """Ranks called different things, so that what is under way will never end."""


@attrs.define(eq=False)
class ExpectedMessage:
    """The signature of a message that this rank is going to receive."""

    record: Record
    header: torch.Tensor
    work: Work
    timeout_s: float | None
    rank: int

    def settle(self, timeout_s: float | None) -> None:
        """Wait for it and compare.

        Raises:
            UsageError: The peer sends something else than is received here.
            CollectiveTimeoutError: The peer has not sent.
        """
        record = self.record
        try:
            self.work.wait(timeout_s or self.timeout_s)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"rank {self.rank} of {record.group!r} gave up on {record}; missing: rank "
                f"{record.peer}, which has not sent"
            ) from error
        header = Header.from_tensor(self.header.cpu())
        if header is None:
            raise CollectiveError(f"{record}: its signature was lost")
        if header.digest != _digest_of_message(record):
            raise DisagreementError(
                f"{record.group!r}: a message differs between its ends: rank {record.peer} "
                f"{header.text}; rank {self.rank} {record}. Shape and dtype must be alike, and "
                "messages of one tag are received in the order in which they are sent"
            )

    def is_done(self, within_s: float) -> bool:
        """Return whether it has come."""
        return self.work.is_done(within_s)


def _digest_of_message(record: Record) -> int:
    return digest_of(f"{record.shape} {record.dtype} {record.tag}")
