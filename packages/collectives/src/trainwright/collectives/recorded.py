"""A communicator around another one that counts, remembers and compares what is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from trainwright.collectives import checks
from trainwright.collectives.flight import FlightRecorder
from trainwright.collectives.ledger import Ledger
from trainwright.collectives.placing import PlacingInside
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send, Work
from trainwright.collectives.recorded_work import Block, RecordedBlock
from trainwright.collectives.sampling import Sampler
from trainwright.collectives.told import Told
from trainwright.collectives.traffic import Traffic
from trainwright.collectives.verification import make_verifier

# Between two comparisons of what all ranks have called; the recorder keeps some more.
_SAMPLED_EVERY = 64


class Recorded(PlacingInside):
    """A `Communicator` around ``comm`` with the same results, which counts and remembers.

    ``traffic`` counts what this rank has called; ``recorder`` keeps the last operations with their
    place in the caller's code; errors get notes that tell this rank's last operations. ``check()``
    compares what all ranks have called so far. With ``verify``, each collective is compared before
    it starts: ranks that call different things, or of which some make a mistake, raise one error
    that says who called what and where, nothing has moved, and the communicator works on. Then a
    collective, asynchronous or not, is called once all ranks have come to it, those who do not come
    are named, and programs in which a rank first waits for a message that another one sends after
    the collective come to a standstill. The ends of messages are compared when the receiver waits;
    where they differ the world is stopped by ``abort``.

    By default, in debug, that is unless Python runs with -O, hashes of what ranks called are added
    up after every 64 collectives and looked at 64 later, or at the first such place where no rank
    is in a ``coalesce`` block. That finds calls that differ and yet pass; it makes only those wait
    who are as many collectives ahead.

    Args:
        comm: The communicator that does the work.
        verify: Whether each operation is compared, for debugging. A `Communicator` of the same
            ranks in the same order and of its own is used for that (beside NCCL, one over Gloo
            spares the device); True splits ``comm``; None compares now and then, in debug; False
            never does.
        recorder: Where operations are kept; None makes one. Communicators made by ``split`` share
            it.

    Raises:
        UsageError: ``verify`` is a communicator of other ranks.

    Communicates:
        With ``verify`` one or two splits now, and per operation what `Verifier` says; without it
        nothing now, and what `Sampler` says or nothing later. All ranks construct together, with
        the same ``verify``, and with or without -O.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        verify: bool | Communicator | None = None,
        recorder: FlightRecorder | None = None,
    ) -> None:
        self._comm = comm
        self._verify = verify
        is_sampled = verify is None and __debug__
        sampler = Sampler(comm, _SAMPLED_EVERY) if is_sampled else None
        verifier = make_verifier(comm, verify) if verify else None
        recorder = FlightRecorder() if recorder is None else recorder
        self._ledger = Ledger(comm, recorder, verifier, sampler)

    @property
    def rank(self) -> int:
        """See `Communicator.rank`."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """See `Communicator.size`."""
        return self._comm.size

    @property
    def device(self) -> torch.device:
        """See `Communicator.device`."""
        return self._comm.device

    @property
    def name(self) -> str:
        """See `Communicator.name`."""
        return self._comm.name

    @property
    def traffic(self) -> Traffic:
        """What this rank has called so far, counted; without what ``verify`` sends."""
        return self._ledger.traffic

    @property
    def recorder(self) -> FlightRecorder:
        """The last operations of this rank."""
        return self._ledger.recorder

    def __repr__(self) -> str:
        """Name the communicator inside."""
        return f"Recorded({self._comm!r})"

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.all_reduce`."""
        with self._ledger.starting("all_reduce", timeout_s) as started:
            work = self._comm.all_reduce(tensor, op, reduce_dtype=reduce_dtype, timeout_s=timeout_s)
            started.take(work, Told("all_reduce", tensor, tensor, tensor, op, reduce_dtype))
        return self._ledger.follow(started)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.reduce_scatter`."""
        with self._ledger.starting("reduce_scatter", timeout_s) as started:
            work = self._comm.reduce_scatter(
                output, input, op, reduce_dtype=reduce_dtype, timeout_s=timeout_s
            )
            started.take(work, Told("reduce_scatter", output, input, output, op, reduce_dtype))
        return self._ledger.follow(started)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.all_gather`."""
        with self._ledger.starting("all_gather", timeout_s) as started:
            work = self._comm.all_gather(output, input, timeout_s=timeout_s)
            started.take(work, Told("all_gather", input, input, output))
        return self._ledger.follow(started)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.all_to_all`."""
        with self._ledger.starting("all_to_all", timeout_s) as started:
            work = self._comm.all_to_all(
                output, input, output_splits, input_splits, timeout_s=timeout_s
            )
            splits = (input_splits, output_splits)
            started.take(work, Told("all_to_all", input, input, output, splits=splits))
        return self._ledger.follow(started)

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout_s: float | None = None) -> Work:
        """See `Communicator.broadcast`."""
        with self._ledger.starting("broadcast", timeout_s) as started:
            work = self._comm.broadcast(tensor, root, timeout_s=timeout_s)
            read, written = (tensor, None) if root == self.rank else (None, tensor)
            started.take(work, Told("broadcast", tensor, read, written, root=root))
        return self._ledger.follow(started)

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.reduce`."""
        with self._ledger.starting("reduce", timeout_s) as started:
            work = self._comm.reduce(
                tensor, root, op, reduce_dtype=reduce_dtype, timeout_s=timeout_s
            )
            written = tensor if root == self.rank else None
            started.take(work, Told("reduce", tensor, tensor, written, op, reduce_dtype, root))
        return self._ledger.follow(started)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.scatter`."""
        with self._ledger.starting("scatter", timeout_s) as started:
            work = self._comm.scatter(output, input, root, timeout_s=timeout_s)
            started.take(work, Told("scatter", output, input, output, root=root))
        return self._ledger.follow(started)

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.gather`."""
        with self._ledger.starting("gather", timeout_s) as started:
            work = self._comm.gather(output, input, root, timeout_s=timeout_s)
            started.take(work, Told("gather", input, input, output, root=root))
        return self._ledger.follow(started)

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.send`."""
        with self._ledger.messaging("send"):
            work = self._comm.send(tensor, peer, tag, timeout_s=timeout_s)
        return self._ledger.follow_messages(work, "send", [Send(tensor, peer, tag)], timeout_s)

    def recv(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.recv`."""
        with self._ledger.messaging("recv"):
            work = self._comm.recv(tensor, peer, tag, timeout_s=timeout_s)
        return self._ledger.follow_messages(work, "recv", [Recv(tensor, peer, tag)], timeout_s)

    def exchange(self, messages: Sequence[Send | Recv], *, timeout_s: float | None = None) -> Work:
        """See `Communicator.exchange`."""
        with self._ledger.messaging("exchange"):
            work = self._comm.exchange(messages, timeout_s=timeout_s)
        return self._ledger.follow_messages(work, "exchange", messages, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """See `Communicator.barrier`."""
        if self._ledger.block is not None:
            self._comm.barrier(timeout_s=timeout_s)  # which raises
        check = partial(checks.check_timeout, "barrier", timeout_s)
        with self._ledger.blocking("barrier", check, timeout_s):
            self._comm.barrier(timeout_s=timeout_s)

    def split(self, color: int | None, key: int = 0) -> Recorded | None:
        """See `Communicator.split`; the part records to the same recorder, and verifies too."""
        if self._ledger.block is not None:
            self._comm.split(color, key)  # which raises
        verifier = self._ledger.verifier
        with self._ledger.blocking("split", partial(checks.check_color, color, key)):
            part = self._comm.split(color, key)
            compared = verifier and verifier.calls.split(color, key)
        if part is None:
            return None
        return Recorded(part, verify=compared or self._verify, recorder=self.recorder)

    @contextmanager
    def coalesce(self) -> Iterator[Work]:
        """See `Communicator.coalesce`."""
        with self._comm.coalesce() as work:
            block = self._ledger.block = Block()
            try:
                yield RecordedBlock(work, block)
            finally:
                self._ledger.block = None
            if block.error is not None:
                raise block.error  # so that nothing of the block starts
        block.is_open = False

    def check(self, *, timeout_s: float | None = None) -> None:
        """Compare what all ranks have called so far, messages left out.

        Raises:
            UsageError: They called different collectives; the same text on every rank, which names
                the first that differs, who called what, and where.

        Communicates:
            One all-gather of 16 bytes a rank; where ranks differ, their recorded operations.
        """
        self._ledger.check(timeout_s)

    def abort(self, cause: BaseException | str) -> None:
        """See `Communicator.abort`."""
        self._comm.abort(cause)
