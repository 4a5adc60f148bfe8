"""The one front of all communicators: it checks a call once and hands it to a transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch

from trainwright.collectives import checks
from trainwright.collectives.calls import Backend, Call, Kind
from trainwright.collectives.errors import UsageError
from trainwright.collectives.protocol import Recv, ReduceOp, Send, Work
from trainwright.collectives.staging import Copies, readable, writable
from trainwright.collectives.works import CopyBackWork, DeferredWork, JoinedWork


class CheckedCommunicator:
    """A `Communicator` over a `Backend`: checks arguments and copies strided tensors in and out."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._rank = backend.rank
        self._size = backend.size
        self._device = backend.device
        self._deferred: list[tuple[Call | Sequence[Send | Recv], DeferredWork]] | None = None

    @property
    def rank(self) -> int:
        """This rank's number within the communicator."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    @property
    def device(self) -> torch.device:
        """Where tensors must live."""
        return self._device

    @property
    def name(self) -> str:
        """A name for messages; the same on every rank."""
        return self._backend.name

    def __repr__(self) -> str:
        """Name the kind, the group and this rank."""
        return f"{type(self).__name__}({self.name!r}, rank {self._rank} of {self._size})"

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.all_reduce`."""
        what = "all_reduce"
        copies: Copies = []
        data = writable(what, tensor, self._device, copies, keep=True)
        dtype = checks.resolve_reduce_dtype(what, data.dtype, op, reduce_dtype)
        call = Call(Kind.ALL_REDUCE, data, data, tuple(data.shape), data.dtype, op, dtype)
        return self._start(call, timeout_s, copies)

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
        what = "reduce_scatter"
        copies: Copies = []
        checks.check_same_dtype(what, output, input)
        dtype = checks.resolve_reduce_dtype(what, output.dtype, op, reduce_dtype)
        checks.check_concatenated(what, input, output, self._size)
        source = readable(what, input, self._device)
        target = writable(what, output, self._device, copies)
        checks.check_own_slice(what, source, target, self._rank)
        shape = tuple(target.shape)
        call = Call(Kind.REDUCE_SCATTER, target, source, shape, target.dtype, op, dtype)
        return self._start(call, timeout_s, copies)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.all_gather`."""
        what = "all_gather"
        copies: Copies = []
        checks.check_same_dtype(what, output, input)
        checks.check_concatenated(what, output, input, self._size)
        source = readable(what, input, self._device)
        target = writable(what, output, self._device, copies)
        checks.check_own_slice(what, target, source, self._rank)
        call = Call(Kind.ALL_GATHER, target, source, tuple(source.shape), source.dtype)
        return self._start(call, timeout_s, copies)

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
        what = "all_to_all"
        copies: Copies = []
        checks.check_same_dtype(what, output, input)
        checks.check_rows(what, output, input)
        outs = checks.resolve_splits(what, "output_splits", output_splits, output, self._size)
        ins = checks.resolve_splits(what, "input_splits", input_splits, input, self._size)
        source = readable(what, input, self._device)
        target = writable(what, output, self._device, copies)
        checks.check_apart(what, target, source)
        call = Call(Kind.ALL_TO_ALL, target, source, tuple(source.shape[1:]), source.dtype)
        call.output_splits = outs
        call.input_splits = ins
        return self._start(call, timeout_s, copies)

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout_s: float | None = None) -> Work:
        """See `Communicator.broadcast`."""
        what = "broadcast"
        copies: Copies = []
        checks.check_rank(what, "root", root, self._size)
        if root == self._rank:
            data = readable(what, tensor, self._device)
        else:
            data = writable(what, tensor, self._device, copies)
        call = Call(Kind.BROADCAST, data, data, tuple(data.shape), data.dtype, root=root)
        return self._start(call, timeout_s, copies)

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
        what = "reduce"
        copies: Copies = []
        checks.check_rank(what, "root", root, self._size)
        if root == self._rank:
            data = writable(what, tensor, self._device, copies, keep=True)
        else:
            data = readable(what, tensor, self._device)
        dtype = checks.resolve_reduce_dtype(what, data.dtype, op, reduce_dtype)
        shape = tuple(data.shape)
        call = Call(Kind.REDUCE, data, data, shape, data.dtype, op, dtype, root)
        return self._start(call, timeout_s, copies)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.scatter`."""
        what = "scatter"
        copies: Copies = []
        checks.check_rank(what, "root", root, self._size)
        checks.check_only_on_root(what, "input", input, root, self._rank)
        source = None
        if input is not None:
            checks.check_same_dtype(what, output, input)
            checks.check_concatenated(what, input, output, self._size)
            source = readable(what, input, self._device)
        target = writable(what, output, self._device, copies)
        if source is not None:
            checks.check_own_slice(what, source, target, self._rank)
        shape = tuple(target.shape)
        call = Call(Kind.SCATTER, target, source, shape, target.dtype, root=root)
        return self._start(call, timeout_s, copies)

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.gather`."""
        what = "gather"
        copies: Copies = []
        checks.check_rank(what, "root", root, self._size)
        checks.check_only_on_root(what, "output", output, root, self._rank)
        source = readable(what, input, self._device)
        target = None
        if output is not None:
            checks.check_same_dtype(what, output, input)
            checks.check_concatenated(what, output, input, self._size)
            target = writable(what, output, self._device, copies)
            checks.check_own_slice(what, target, source, self._rank)
        shape = tuple(source.shape)
        call = Call(Kind.GATHER, target, source, shape, source.dtype, root=root)
        return self._start(call, timeout_s, copies)

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.send`."""
        return self.exchange((Send(tensor, peer, tag),), timeout_s=timeout_s)

    def recv(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.recv`."""
        return self.exchange((Recv(tensor, peer, tag),), timeout_s=timeout_s)

    def exchange(self, messages: Sequence[Send | Recv], *, timeout_s: float | None = None) -> Work:
        """See `Communicator.exchange`."""
        copies: Copies = []
        checked: list[Send | Recv] = []
        for message in checks.check_messages(messages):
            what = "send" if isinstance(message, Send) else "recv"
            checks.check_peer(what, message.peer, self._rank, self._size)
            if isinstance(message, Send):
                data = readable(what, message.tensor, self._device)
            else:
                data = writable(what, message.tensor, self._device, copies)
            is_same = data is message.tensor
            checked.append(message if is_same else attrs.evolve(message, tensor=data))
        checks.check_timeout("exchange", timeout_s)
        if self._deferred is None:
            work = self._backend.exchange(checked, timeout_s)
        elif timeout_s is None:
            work = self._defer(checked)
        else:
            raise UsageError("timeout_s of messages in a coalesce() block: give it to wait()")
        return CopyBackWork(work, copies) if copies else work

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """See `Communicator.barrier`."""
        self._refuse_inside_coalesce("barrier")
        self._start(Call(Kind.BARRIER), timeout_s, []).wait()

    def split(self, color: int | None, key: int = 0) -> CheckedCommunicator | None:
        """See `Communicator.split`."""
        self._refuse_inside_coalesce("split")
        checks.check_color(color, key)
        backend = self._backend.split(color, key)
        return None if backend is None else CheckedCommunicator(backend)

    @contextmanager
    def coalesce(self) -> Iterator[Work]:
        """See `Communicator.coalesce`."""
        self._refuse_inside_coalesce("coalesce")
        deferred: list[tuple[Call | Sequence[Send | Recv], DeferredWork]] = []
        self._deferred = deferred
        joined = DeferredWork()
        try:
            yield joined
        finally:
            self._deferred = None
        started = self._backend.start_together([item for item, _ in deferred])
        for (_, work), inner in zip(deferred, started, strict=True):
            work.start(inner)
        joined.start(JoinedWork(started))

    def abort(self, cause: BaseException | str) -> None:
        """See `Communicator.abort`."""
        named = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        self._backend.abort(named)

    def _start(self, call: Call, timeout_s: float | None, copies: Copies) -> Work:
        if timeout_s is not None:
            checks.check_timeout(call.kind.value, timeout_s)
            call.timeout_s = timeout_s
        if self._deferred is not None:
            work: Work = self._defer(call)
        else:
            work = self._backend.start(call)
        return CopyBackWork(work, copies) if copies else work

    def _defer(self, item: Call | Sequence[Send | Recv]) -> DeferredWork:
        assert self._deferred is not None
        work = DeferredWork()
        self._deferred.append((item, work))
        return work

    def _refuse_inside_coalesce(self, what: str) -> None:
        if self._deferred is not None:
            raise UsageError(
                f"{what} cannot be part of a coalesce() block; call it after the block"
            )
