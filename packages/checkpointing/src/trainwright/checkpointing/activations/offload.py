"""Keeps tensors in the memory of the host, or in a file, from the forward to the backward.

On a GPU copies go by way of pinned memory on a stream of their own, beside the computing; the way
back begins one tensor ahead of the backward. On a machine without, a copy is a plain copy.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Protocol

import attrs
import torch

from trainwright.checkpointing.errors import PolicyError

from .strided import Strided, is_plain


class Stored(Protocol):
    """Bytes somewhere else, given back when nobody refers to it any more."""

    def begin_load(self) -> None:
        """Start the way back, if that can go on beside other work."""
        ...

    def load(self, target: torch.Tensor) -> None:
        """Copy all elements to ``target``, of the shape and dtype that was stored."""
        ...


class Storage(Protocol):
    """Where elements are kept."""

    def store(self, elements: torch.Tensor) -> Stored:
        """Return the elements of a tensor, of any strides, in the order of its dims, stored."""
        ...


@attrs.frozen(eq=False)
class HeldElsewhere:
    """A tensor of which nothing stays where the model runs."""

    stored: Stored
    layout: Strided
    before: weakref.ref[HeldElsewhere] | None
    ahead: int

    @property
    def resident(self) -> tuple[torch.Tensor, ...]:
        """Nothing."""
        return ()

    def restore(self) -> torch.Tensor:
        """Return the tensor; those that were held just before start on their way back."""
        self.stored.begin_load()
        self._begin_others()
        elements = self.layout.empty()
        self.stored.load(elements)
        return self.layout.spread(elements)

    def _begin_others(self) -> None:
        other: HeldElsewhere | None = self
        for _ in range(self.ahead):
            other = None if other is None or other.before is None else other.before()
            if other is not None:
                other.stored.begin_load()


class Offload:
    """Keeper of tensors in a `Storage`; see `offload_to_cpu` and `offload_to_folder`.

    Args:
        storage: Where they go.
        min_bytes: Smaller tensors stay where they are.
        ahead: How many tensors are brought back before backward asks for them, where that goes on
            beside computing.
    """

    def __init__(self, storage: Storage, *, min_bytes: int = 0, ahead: int = 1) -> None:
        for name, value in (("min_bytes", min_bytes), ("ahead", ahead)):
            if type(value) is not int or value < 0:
                raise PolicyError(f"{name} must be a whole number, at least 0, got {value!r}")
        self.storage = storage
        self._min_bytes = min_bytes
        self._ahead = ahead
        self._last = threading.local()  # ranks that are threads have orders of their own

    def hold(self, tensor: torch.Tensor) -> HeldElsewhere | None:
        """Return the tensor held elsewhere, or None where it is small or cannot be copied."""
        if tensor.numel() * tensor.element_size() < self._min_bytes or not is_plain(tensor):
            return None
        layout = Strided.of(tensor)
        before = getattr(self._last, "ref", None)
        held = HeldElsewhere(self.storage.store(layout.take(tensor)), layout, before, self._ahead)
        self._last.ref = weakref.ref(held)
        return held


class HostMemory:
    """Host memory in which tensors are kept, with a count of its own."""

    def __init__(self) -> None:
        self._held_bytes = 0
        self._peak_bytes = 0
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        self._streams: dict[torch.device, _Streams] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        with self._lock:
            self._settle()
            return self._held_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes held at once."""
        return self._peak_bytes

    def store(self, elements: torch.Tensor) -> Stored:
        """Copy the elements to host memory."""
        size = elements.numel() * elements.element_size()
        stored: _InHost | _InPinnedHost
        if not _has_streams(elements.device):
            stored = _InHost(torch.empty(elements.shape, dtype=elements.dtype).copy_(elements))
        else:
            stored = _InPinnedHost(elements, self._streams_of(elements.device))
        # A finaliser may run anywhere, also where this thread holds the lock.
        weakref.finalize(stored, self._freed.append, size).atexit = False
        with self._lock:
            self._settle()
            self._held_bytes += size
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        return stored

    def _settle(self) -> None:
        while self._freed:
            self._held_bytes -= self._freed.popleft()

    def _streams_of(self, device: torch.device) -> _Streams:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _Streams(device)
            return self._streams[device]


@attrs.frozen(eq=False)
class _InHost:
    """A plain copy."""

    copy: torch.Tensor

    def begin_load(self) -> None:
        """Nothing goes on beside the processor's other work."""

    def load(self, target: torch.Tensor) -> None:
        target.copy_(self.copy)


class _Streams:
    """The streams of a device for the way out and the way back."""

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.out = self.module.Stream(device)
        self.back = self.module.Stream(device)
        self.device = device


class _InPinnedHost:
    """A copy in pinned memory, made and brought back beside what the device computes."""

    def __init__(self, elements: torch.Tensor, streams: _Streams) -> None:
        module = streams.module
        self._streams = streams
        self._arrived: tuple[torch.Tensor, object] | None = None
        source = elements.contiguous()
        self._copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        streams.out.wait_stream(module.current_stream(streams.device))
        with module.stream(streams.out):
            self._copy.copy_(source, non_blocking=True)
        source.record_stream(streams.out)  # not to be written over before the copy has read it
        self._gone = streams.out.record_event()

    def begin_load(self) -> None:
        if self._arrived is not None:
            return
        streams = self._streams
        with streams.module.stream(streams.back):
            streams.back.wait_event(self._gone)
            arrived = self._copy.to(streams.device, non_blocking=True)
            self._arrived = (arrived, streams.back.record_event())

    def load(self, target: torch.Tensor) -> None:
        self.begin_load()
        assert self._arrived is not None
        (arrived, event), self._arrived = self._arrived, None
        current = self._streams.module.current_stream(self._streams.device)
        current.wait_event(event)
        target.copy_(arrived)
        arrived.record_stream(current)


def _has_streams(device: torch.device) -> bool:
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "Stream")


def offload_to_cpu(*, min_bytes: int = 0, ahead: int = 1) -> Offload:
    """Return the keeper that holds tensors in host memory.

    Bitwise, strides included. On a GPU the memory is pinned, and copies overlap with computing; a
    tensor that is brought back takes its bytes twice for a moment. On the CPU a copy is what it is:
    it serves tests and budgets of another allocator, and saves nothing.

    Args:
        min_bytes: Smaller tensors stay where they are.
        ahead: How many tensors come back before backward asks for them (on a GPU).
    """
    return Offload(HostMemory(), min_bytes=min_bytes, ahead=ahead)
