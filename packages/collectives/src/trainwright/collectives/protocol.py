"""What a communicator offers, and nothing about how it is done."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import attrs
import torch


class ReduceOp(enum.Enum):
    """How contributions of the ranks are combined, element by element.

    The logical ones ask of an element of any dtype whether it is not zero (a NaN is not) and give
    1 or 0 in that dtype; exclusive or is true where an odd number of ranks is. The bitwise ones
    are for integers and bool.
    """

    SUM = "sum"
    AVG = "avg"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"
    LOGICAL_AND = "logical_and"
    LOGICAL_OR = "logical_or"
    LOGICAL_XOR = "logical_xor"
    BITWISE_AND = "bitwise_and"
    BITWISE_OR = "bitwise_or"
    BITWISE_XOR = "bitwise_xor"

    @property
    def is_logical(self) -> bool:
        """Whether it combines truth values."""
        return self in _LOGICAL

    @property
    def is_bitwise(self) -> bool:
        """Whether it combines the bits of integers."""
        return self in _BITWISE


_LOGICAL = (ReduceOp.LOGICAL_AND, ReduceOp.LOGICAL_OR, ReduceOp.LOGICAL_XOR)
_BITWISE = (ReduceOp.BITWISE_AND, ReduceOp.BITWISE_OR, ReduceOp.BITWISE_XOR)


@runtime_checkable
class Work(Protocol):
    """A started operation; its buffers belong to it until it has been waited for."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Make the result visible: blocks the host on CPU, orders the current stream on CUDA.

        Waiting twice is allowed and does nothing the second time.
        """
        ...

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether all messages have come, so that ``wait`` would not block the host.

        On CUDA that means that the device has come as far. True also where ``wait`` would raise;
        False also where a backend cannot tell before somebody has waited.

        Args:
            within_s: Waits up to this many seconds for it.
        """
        ...


@attrs.frozen(eq=False)
class Send:
    """One outgoing message of an ``exchange``."""

    tensor: torch.Tensor
    peer: int
    tag: int = 0


@attrs.frozen(eq=False)
class Recv:
    """One incoming message of an ``exchange``; the tensor is written in place."""

    tensor: torch.Tensor
    peer: int
    tag: int = 0


@runtime_checkable
class Communicator(Protocol):
    """An ordered group of ranks that can exchange tensors.

    ``rank`` and ``size`` and every ``peer`` and ``root`` count within this communicator. All ranks
    call the same collectives in the same order with the same shapes and dtypes. Every operation
    returns a `Work`. ``input`` and ``output`` are contiguous, concatenated by rank along dim 0;
    in ``all_gather`` and ``reduce_scatter`` the small tensor may be this rank's slice of the large
    one. Strided tensors are copied in and out, or refused, never misread. ``reduce_dtype`` is the
    dtype in which contributions are added (None: at least float32 for floating-point inputs); the
    result is rounded once to the tensor's dtype.

    Reductions are deterministic: contributions are combined in the order of the ranks, so that the
    bits are the same on every rank, whoever comes first, and on every communicator. What adds in
    another order, such as NCCL or a ring, says so and is another function or an argument.
    """

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Where tensors must live."""
        ...

    @property
    def name(self) -> str:
        """A name for messages; the same on every rank."""
        ...

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Combine ``tensor`` over all ranks, in place, on every rank."""
        ...

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Combine ``input`` [size * n, ...] over all ranks; rank r keeps rows r*n..(r+1)*n."""
        ...

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout_s: float | None = None
    ) -> Work:
        """Concatenate every rank's ``input`` [n, ...] into ``output`` [size * n, ...]."""
        ...

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Send part q of ``input`` (along dim 0) to rank q; splits None means equal parts."""
        ...

    def broadcast(self, tensor: torch.Tensor, root: int, *, timeout_s: float | None = None) -> Work:
        """Copy root's ``tensor`` to every rank, in place."""
        ...

    def reduce(
        self,
        tensor: torch.Tensor,
        root: int,
        op: ReduceOp = ReduceOp.SUM,
        *,
        reduce_dtype: torch.dtype | None = None,
        timeout_s: float | None = None,
    ) -> Work:
        """Combine ``tensor`` over all ranks into root's ``tensor``; the others' are unchanged."""
        ...

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | None,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Rank r gets rows r*n..(r+1)*n of root's ``input``; None on the other ranks."""
        ...

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        root: int,
        *,
        timeout_s: float | None = None,
    ) -> Work:
        """Concatenate every rank's ``input`` into root's ``output``; None on the other ranks."""
        ...

    def send(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Start sending ``tensor`` to ``peer``; messages of one tag arrive in order."""
        ...

    def recv(
        self, tensor: torch.Tensor, peer: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Work:
        """Start receiving into ``tensor`` from ``peer``; shape and dtype match the sender's."""
        ...

    def exchange(self, messages: Sequence[Send | Recv], *, timeout_s: float | None = None) -> Work:
        """Start all messages together, so that no order among them can deadlock."""
        ...

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank has arrived."""
        ...

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Collectively make one communicator a color, ranks ordered by (key, rank).

        A rank that passes no color takes part in the call and gets None.
        """
        ...

    def coalesce(self) -> AbstractContextManager[Work]:
        """Start the operations of the block together; its Work is valid after the block."""
        ...

    def abort(self, cause: BaseException | str) -> None:
        """Tell the peers that this rank gives up; their pending and later operations raise."""
        ...
