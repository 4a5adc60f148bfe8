"""What a `Recorded` communicator writes down about each of its operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import attrs

from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.checks import resolve_reduce_dtype
from trainwright.collectives.errors import CollectiveError, UsageError
from trainwright.collectives.flight import FlightRecorder, Record, find_place
from trainwright.collectives.headers import digest_of
from trainwright.collectives.histories import History, compare_histories
from trainwright.collectives.protocol import Communicator, Recv, Send, Work
from trainwright.collectives.recorded_work import Block, Proof, RecordedWork
from trainwright.collectives.sampling import Sampler
from trainwright.collectives.told import Started, Told, rows
from trainwright.collectives.traffic import Traffic, TrafficCounter, elements_sent
from trainwright.collectives.verification import Claim, DisagreementError, Verifier

# How many of the last operations an error tells of.
_NUM_TOLD = 8


class Ledger:
    """The records, the traffic and the digest of one communicator on one rank."""

    def __init__(
        self,
        comm: Communicator,
        recorder: FlightRecorder,
        verifier: Verifier | None,
        sampler: Sampler | None,
    ) -> None:
        self.recorder = recorder
        self.verifier = verifier
        self._sampler = sampler
        self.block: Block | None = None
        self._comm = comm
        self._counter = TrafficCounter()
        self._num_collectives = 0
        self._num_messages = 0
        self._digest = 0

    @property
    def traffic(self) -> Traffic:
        """What has been called so far, counted."""
        return self._counter.traffic

    @contextmanager
    def starting(self, kind: str, timeout_s: float | None) -> Iterator[Started]:
        """Start a collective inside the block, which tells what it was, and write it down.

        It is checked inside the block, but where calls are compared it starts after all ranks have
        come to it and agree.
        """
        started = Started()
        self._sample(kind)
        with self._noting(kind), self._held_back():
            try:
                yield started
            except UsageError as error:
                self._refuse(kind, error, None)  # the time may be what is refused
                raise
            assert started.told is not None
            started.record = self._enter(started.told)
            self._compare(started.record, started.told, timeout_s)

    def follow(self, started: Started) -> Work:
        """Return what waits for a collective that has been started."""
        assert started.work is not None
        assert started.record is not None
        return self._wrap(started.work, [started.record])

    @contextmanager
    def messaging(self, kind: str) -> Iterator[None]:
        """Add notes to an error that starting messages raises."""
        with self._noting(kind):
            yield

    def follow_messages(
        self, work: Work, kind: str, messages: Sequence[Send | Recv], timeout_s: float | None
    ) -> Work:
        """Write down messages that have been started together."""
        self._counter.add_messages(kind, messages)
        records = [self._enter_message(message) for message in messages]
        proofs: list[Proof] = []
        sent: list[Work] = []
        if self.verifier is not None:
            with self._explaining(records):
                for record in records:
                    if record.kind == "send":
                        sent.append(self.verifier.send(record))
                    else:
                        proofs.append(self.verifier.recv(record, timeout_s))
        return self._wrap(work, records, proofs, sent)

    @contextmanager
    def blocking(
        self, kind: str, check: Callable[[], None], timeout_s: float | None = None
    ) -> Iterator[None]:
        """Write down an operation without tensors that returns when it is over."""
        self._sample(kind)
        try:
            check()
        except UsageError as error:
            self._refuse(kind, error, None)
            raise
        told = Told(kind)
        record = self._enter(told)
        with self._explaining([record]):
            self._compare(record, told, timeout_s)
            yield
        record.finished_s = time.time()

    def check(self, timeout_s: float | None) -> None:
        """Compare the digests of all ranks, and their records where those differ."""
        with self._noting("check"):
            compare_histories(self._comm, self._history(), timeout_s)

    def _history(self) -> History:
        records = self.recorder.records(self._comm.name)
        own = [record for record in records if record.peer is None]
        return History(self._num_collectives, self._digest, own)

    def _enter(self, told: Told) -> Record:
        like = told.like
        shape = None
        if like is not None:
            shape = tuple(like.shape[1:] if told.splits is not None else like.shape)
        record = Record(
            self._comm.name,
            self._num_collectives,
            told.kind,
            shape,
            None if like is None else describe_dtype(like.dtype),
            None if told.op is None else told.op.name,
            _unusual_reduce_dtype(told),
            told.root,
            place=find_place(),
            started_s=time.time(),
        )
        self._num_collectives += 1
        self._digest = (self._digest + digest_of(record.signature)) % 2**64
        self._count(told)
        self.recorder.add(record)
        return record

    def _enter_message(self, message: Send | Recv) -> Record:
        record = Record(
            self._comm.name,
            self._num_messages,
            "send" if isinstance(message, Send) else "recv",
            tuple(message.tensor.shape),
            describe_dtype(message.tensor.dtype),
            peer=message.peer,
            tag=message.tag,
            place=find_place(),
            started_s=time.time(),
        )
        self._num_messages += 1
        self.recorder.add(record)
        return record

    @contextmanager
    def _noting(self, kind: str) -> Iterator[None]:
        try:
            yield
        except UsageError:
            raise  # nothing has happened
        except CollectiveError as error:
            raise self._explain(error, f"{kind} at {find_place()}") from error.__cause__

    def _sample(self, kind: str) -> None:
        if self._sampler is not None:
            with self._noting(kind):
                self._sampler.look(self._history, self._num_collectives, self._digest, self.block)

    def _held_back(self) -> AbstractContextManager[object]:
        """Return a block inside which calls are checked and do not start yet."""
        is_held = self.verifier is None or self.block is not None
        return nullcontext() if is_held else self._comm.coalesce()

    def _compare(self, record: Record, told: Told, timeout_s: float | None) -> None:
        if self.verifier is None:
            return
        claim = Claim(record.signature, str(record))
        if told.splits is not None:
            size = self._comm.size
            claim = attrs.evolve(
                claim,
                rows_out=rows(told.splits[0], told.read, size),
                rows_in=rows(told.splits[1], told.written, size),
            )
        self._ask(claim, record, timeout_s)

    def _refuse(self, kind: str, error: UsageError, timeout_s: float | None) -> None:
        """Tell the others that this rank's own call was wrong; return if theirs were, too."""
        if self.verifier is None:
            return
        record = self._enter(Told(kind))
        record.error = f"{type(error).__name__}: {error}"
        text = f"{record}, which raised {record.error}"
        self._ask(Claim(f"refused #{record.number}", text), record, timeout_s)

    def _ask(self, claim: Claim, record: Record, timeout_s: float | None) -> None:
        assert self.verifier is not None
        try:
            self.verifier.compare(claim, timeout_s)
        except CollectiveError as error:
            record.error = f"{type(error).__name__}: {error}"
            if self.block is not None and isinstance(error, UsageError):
                self.block.error = error
            raise

    def _count(self, told: Told) -> None:
        like = told.like
        if like is None:
            self._counter.add(told.kind, 0, 0, 0, 0)
            return
        rank, size = self._comm.rank, self._comm.size
        read = 0 if told.read is None else told.read.numel()
        written = 0 if told.written is None else told.written.numel()
        if told.splits is not None:
            row = like[:1].numel()
            sent = read - rows(told.splits[0], told.read, size)[rank] * row
        else:
            large = max(read, written)
            if told.kind == "gather":
                large = read * size
            elif told.kind == "scatter":
                large = written * size
            sent = elements_sent(told.kind, large, rank, size, told.root)
        self._counter.add(told.kind, read, written, sent, like.itemsize)

    def _wrap(
        self,
        work: Work,
        records: Sequence[Record],
        proofs: Sequence[Proof] = (),
        sent: Sequence[Work] = (),
    ) -> Work:
        wrapped = RecordedWork(work, records, proofs, self._fail, self.block, sent)
        if self.block is not None:
            self.block.works.append(wrapped)
        return wrapped

    @contextmanager
    def _explaining(self, records: Sequence[Record]) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise self._fail(error, records) from error.__cause__

    def _fail(self, error: CollectiveError, records: Sequence[Record]) -> CollectiveError:
        if isinstance(error, DisagreementError):
            # What is under way will never end, and ranks that wait elsewhere do not know why.
            self._comm.abort(str(error))
        for record in records:
            self._explain(error, str(record))
            record.error = f"{type(error).__name__}: {error}"
        return error

    def _explain(self, error: CollectiveError, what: str) -> CollectiveError:
        note = f"rank {self._comm.rank} was in {what} of {self._comm.name!r}"
        if not any(note in other for other in getattr(error, "__notes__", ())):
            error.add_note(f"{note}; its last operations:\n{self.recorder.dump(_NUM_TOLD)}")
        return error


def _unusual_reduce_dtype(told: Told) -> str | None:
    if told.like is None or told.op is None or told.reduce_dtype is None:
        return None
    usual = resolve_reduce_dtype(told.kind, told.like.dtype, told.op, None)
    return None if told.reduce_dtype is usual else describe_dtype(told.reduce_dtype)
