"""Comparing what ranks are about to do, so that calls that differ raise instead of hanging."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trainwright.collectives.errors import CollectiveError, CollectiveTimeoutError, UsageError
from trainwright.collectives.flight import Record
from trainwright.collectives.headers import HASHES, Header, blank_headers, digest_of, tell_groups
from trainwright.collectives.objects import all_gather_object
from trainwright.collectives.protocol import Communicator, Work

_RULE = (
    "All ranks must call the same operations in the same order with the same shapes, dtypes and "
    "arguments"
)


@attrs.frozen
class Claim:
    """What one rank is about to do.

    Args:
        signature: What must be alike on every rank.
        text: What to tell of it, with its place.
        rows_out: Of an all-to-all, how many rows go to each rank.
        rows_in: Of an all-to-all, how many rows come from each rank.
    """

    signature: str
    text: str
    rows_out: Sequence[int] = ()
    rows_in: Sequence[int] = ()


class Verifier:
    """Compares the collectives of all ranks before they start, and messages when they come.

    Args:
        calls: A communicator of the same ranks in the same order, for nothing else.
        messages: Another one.
        name: The name of the communicator that is verified.

    Communicates:
        For a collective an all-reduce of 16 bytes, which is waited for; where ranks differ, their
        claims. For a message 256 bytes beside it, which nobody waits for but its receiver.
    """

    def __init__(self, calls: Communicator, messages: Communicator, name: str) -> None:
        self.calls = calls
        self._messages = messages
        self._name = name
        self._agreed = "nothing before"

    def compare(self, claim: Claim, timeout_s: float | None) -> None:
        """Return once all ranks are about to do the same.

        Raises:
            UsageError: They are not; the same text on every rank.
            CollectiveTimeoutError: Ranks have not come; the text names them.
        """
        comm = self.calls
        digest = digest_of(claim.signature) % HASHES
        balance = _balance(claim, comm.rank)
        totals = torch.tensor([digest, balance], device=comm.device)
        try:
            comm.all_reduce(totals, timeout_s=timeout_s).wait()
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"rank {comm.rank} of {self._name!r} gave up on {claim.text}; all ranks came to "
                f"{self._agreed}. {error}"
            ) from error
        of_digests, of_balances = totals.tolist()
        # Hashes that differ from each other are as good as never alike to their mean.
        if of_digests != digest * comm.size or of_balances % HASHES:
            self._raise_difference(claim, timeout_s)
        self._agreed = claim.text

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

    def _raise_difference(self, claim: Claim, timeout_s: float | None) -> None:
        claims = all_gather_object(self.calls, claim, timeout_s=timeout_s)
        if len({each.signature for each in claims}) > 1:
            said = tell_groups({rank: each.text for rank, each in enumerate(claims)})
            raise UsageError(f"{self._name!r}: ranks called different operations: {said}. {_RULE}")
        wrong = [
            f"rank {sender} sends {sent.rows_out[receiver]} rows to rank {receiver}, which "
            f"expects {expected.rows_in[sender]}"
            for sender, sent in enumerate(claims)
            for receiver, expected in enumerate(claims)
            if sent.rows_out[receiver] != expected.rows_in[sender]
        ]
        raise UsageError(
            f"{self._name!r}: {claim.signature}: {'; '.join(wrong)}; input_splits and "
            "output_splits must agree"
        )


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
    """A message differs between its ends, so that what is under way will never end."""


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


def _balance(claim: Claim, rank: int) -> int:
    """Return a number that adds up to 0 over all ranks where as many rows go as are expected."""
    sent = (digest_of(f"{rank} {to} {rows}") for to, rows in enumerate(claim.rows_out))
    expected = (digest_of(f"{by} {rank} {rows}") for by, rows in enumerate(claim.rows_in))
    return (sum(sent) - sum(expected)) % HASHES
