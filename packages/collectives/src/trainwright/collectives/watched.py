"""A communicator around another one that guards the memory which operations have under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from trainwright.collectives.buffer_watch import BufferWatch, Owned, OwningWork
from trainwright.collectives.checks import check_messages
from trainwright.collectives.errors import UsageError
from trainwright.collectives.flight import find_place
from trainwright.collectives.placing import PlacingInside
from trainwright.collectives.protocol import Communicator, Recv, ReduceOp, Send, Work

Tensors = Sequence[torch.Tensor | None]


class Watched(PlacingInside):
    """A `Communicator` around ``comm`` that raises where memory is touched before it is waited for.

    For debugging: inside of ``with Watched(comm) as comm:`` every operator of this thread, those of
    backwards among them, is checked. What an operation writes may be neither read nor written until
    its Work has been waited for, what it only reads may not be written; views of it count. A Work
    that is dropped keeps its memory. What does not go through PyTorch's operators is not seen:
    ``tolist()``, printing, NumPy's views and kernels of one's own.

    Args:
        comm: The communicator that does the work.

    Raises:
        BufferInFlightError: By the operator, on the rank that has called it.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._watch = BufferWatch()
        self._numbers: list[int] | None = None  # what the operations of a block own

    def __enter__(self) -> Watched:
        """Begin to check the operators of this thread."""
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self._watch.__exit__(*error)  # type: ignore[no-untyped-call]

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

    def __repr__(self) -> str:
        """Name the communicator inside."""
        return f"Watched({self._comm!r})"

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.all_reduce`."""

        def start() -> Work:
            return self._comm.all_reduce(tensor, op, reduce_dtype=reduce_dtype, timeout_s=timeout_s)

        return self._own("all_reduce", start, [tensor])

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

        def start() -> Work:
            return self._comm.reduce_scatter(
                output, input, op, reduce_dtype=reduce_dtype, timeout_s=timeout_s
            )

        return self._own("reduce_scatter", start, [output], [input])

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.all_gather`."""

        def start() -> Work:
            return self._comm.all_gather(output, input, timeout_s=timeout_s)

        return self._own("all_gather", start, [output], [input])

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

        def start() -> Work:
            return self._comm.all_to_all(
                output, input, output_splits, input_splits, timeout_s=timeout_s
            )

        return self._own("all_to_all", start, [output], [input])

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout_s: float | None = None) -> Work:
        """See `Communicator.broadcast`."""

        def start() -> Work:
            return self._comm.broadcast(tensor, root, timeout_s=timeout_s)

        is_root = root == self.rank
        return self._own("broadcast", start, [] if is_root else [tensor], [tensor])

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

        def start() -> Work:
            return self._comm.reduce(
                tensor, root, op, reduce_dtype=reduce_dtype, timeout_s=timeout_s
            )

        is_root = root == self.rank
        return self._own("reduce", start, [tensor] if is_root else [], [tensor])

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.scatter`."""

        def start() -> Work:
            return self._comm.scatter(output, input, root, timeout_s=timeout_s)

        return self._own("scatter", start, [output], [input])

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """See `Communicator.gather`."""

        def start() -> Work:
            return self._comm.gather(output, input, root, timeout_s=timeout_s)

        return self._own("gather", start, [output], [input])

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.send`."""

        def start() -> Work:
            return self._comm.send(tensor, peer, tag, timeout_s=timeout_s)

        return self._own("send", start, [], [tensor])

    def recv(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """See `Communicator.recv`."""

        def start() -> Work:
            return self._comm.recv(tensor, peer, tag, timeout_s=timeout_s)

        return self._own("recv", start, [tensor])

    def exchange(self, messages: Sequence[Send | Recv], *, timeout_s: float | None = None) -> Work:
        """See `Communicator.exchange`."""

        def start() -> Work:
            return self._comm.exchange(messages, timeout_s=timeout_s)

        check_messages(messages)
        written = [message.tensor for message in messages if isinstance(message, Recv)]
        return self._own("exchange", start, written, [message.tensor for message in messages])

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """See `Communicator.barrier`."""
        with self._watch.paused():
            self._comm.barrier(timeout_s=timeout_s)

    def split(self, color: int | None, key: int = 0) -> Watched | None:
        """See `Communicator.split`; the part is watched together with the whole."""
        with self._watch.paused():
            part = self._comm.split(color, key)
        if part is None:
            return None
        made = Watched(part)
        made._watch = self._watch
        return made

    @contextmanager
    def coalesce(self) -> Iterator[Work]:
        """See `Communicator.coalesce`; waiting for its Work gives back all that the block took."""
        numbers: list[int] = []
        before, self._numbers = self._numbers, numbers
        is_open = True
        try:
            # When the block ends the communicator starts its operations.
            with self._watch.paused(), self._comm.coalesce() as work, self._watch.paused(False):
                yield OwningWork(work, self._watch, numbers)
                is_open = False
        except BaseException as error:
            if is_open or isinstance(error, UsageError):
                self._watch.release(numbers)  # nothing of the block has started
            raise
        finally:
            self._numbers = before

    def abort(self, cause: BaseException | str) -> None:
        """See `Communicator.abort`."""
        self._comm.abort(cause)

    def _own(
        self, kind: str, start: Callable[[], Work], written: Tensors, read: Tensors = ()
    ) -> Work:
        """Start an operation and let it own its tensors."""
        with self._watch.paused():
            work = start()
        by = f"{kind} at {find_place()}"
        numbers = [
            self._watch.give(Owned(tensor.detach(), is_written, by))
            for tensors, is_written in ((written, True), (read, False))
            for tensor in tensors
            if tensor is not None
        ]
        if self._numbers is not None:
            self._numbers += numbers
        return OwningWork(work, self._watch, numbers)
