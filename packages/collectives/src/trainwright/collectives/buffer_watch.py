"""Notices at once when an operator of PyTorch touches memory that an operation has under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.collectives.calls import describe_dtype
from trainwright.collectives.errors import BufferInFlightError
from trainwright.collectives.protocol import Work

# Operators that take a tensor for its shape, dtype and device alone.
_READ_NOTHING = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "record_stream",
        "is_set_to",
    )
)  # fmt: skip


@attrs.frozen(eq=False)
class Owned:
    """Memory that belongs to an operation.

    Args:
        tensor: What lies there.
        is_written: Whether the operation writes it; else it may be read meanwhile.
        by: The operation and where it was called.
    """

    tensor: torch.Tensor
    is_written: bool
    by: str


class BufferWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The memory that operations of one rank own, checked before each operator of its thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owned: dict[int, Owned] = {}
        self._num_given = 0
        self._is_paused = False

    @contextmanager
    def paused(self, is_paused: bool = True) -> Iterator[None]:
        """Let a communicator do its work inside, which touches what it owns."""
        before = self._is_paused
        self._is_paused = is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def give(self, owned: Owned) -> int:
        """Let memory belong to an operation; return a number to `release` it by."""
        self._num_given += 1
        self._owned[self._num_given] = owned
        return self._num_given

    def release(self, numbers: Sequence[int]) -> None:
        """Let memory be free again."""
        for number in numbers:
            self._owned.pop(number, None)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, or raise where it touches what is owned."""
        given = kwargs or {}
        if self._owned and not self._is_paused:
            for tensor, is_written in _touched(func, args, given):
                self._check(func, tensor, is_written)
        return func(*args, **given)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler, which takes two seconds.
        return False

    def _check(self, func: Any, tensor: torch.Tensor, is_written: bool) -> None:
        for owned in self._owned.values():
            if (is_written or owned.is_written) and share_memory(tensor, owned.tensor):
                raise BufferInFlightError(
                    f"{func} {'writes' if is_written else 'reads'} memory of the "
                    f"{describe_dtype(owned.tensor.dtype)}{list(owned.tensor.shape)} that "
                    f"{owned.by} has under way; wait() for its Work before"
                )


class OwningWork:
    """A Work that gives memory back once it has been waited for."""

    __slots__ = ("_numbers", "_watch", "_work")

    def __init__(self, work: Work, watch: BufferWatch, numbers: Sequence[int]) -> None:
        self._work = work
        self._watch = watch
        self._numbers = numbers

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait, then let the memory be free."""
        with self._watch.paused():
            self._work.wait(timeout_s)
        self._watch.release(self._numbers)

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether the operation is over; its memory is not free before ``wait``."""
        with self._watch.paused():
            return self._work.is_done(within_s)


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two strided tensors have a byte in common."""
    if a.device != b.device or not a.numel() or not b.numel():
        return False
    starts = a.data_ptr(), b.data_ptr()
    ends = starts[0] + _reach(a), starts[1] + _reach(b)
    if ends[0] <= starts[1] or ends[1] <= starts[0]:
        return False
    if all(
        t.numel() * t.itemsize == end - start
        for t, start, end in zip((a, b), starts, ends, strict=True)
    ):
        return True
    first = min(starts)
    marked = [torch.zeros(max(ends) - first, dtype=torch.bool) for _ in starts]
    for marks, tensor, start in zip(marked, (a, b), starts, strict=True):
        size = tensor.itemsize
        strides = [stride * size for stride in tensor.stride()]
        marks.as_strided((*tensor.shape, size), (*strides, 1), start - first).fill_(True)
    return bool((marked[0] & marked[1]).any())


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element to the end of the last one in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((length - 1) * stride for length, stride in pairs) + 1) * tensor.itemsize


def _touched(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield the tensors that an operator reads or writes, and whether it writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name in _READ_NOTHING:
        return
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue  # a view of it, which touches nothing
        for tensor in value if isinstance(value, list | tuple) else (value,):
            is_tensor = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
            if is_tensor and tensor.device.type != "meta":
                yield tensor, alias is not None
