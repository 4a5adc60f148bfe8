"""Threads that move bytes beside the computing, in order, a few moves at a time."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import attrs
import torch

from trainwright.collectives import Work
from trainwright.sharding.offload.errors import OffloadError


class Pace:
    """A rate that moves share, as they would share a bus or a disk; for tests and measurements.

    Args:
        bytes_s: Bytes a second; None lets every move take what it takes.

    Raises:
        OffloadError: The rate is not positive.
    """

    def __init__(self, bytes_s: float | None = None) -> None:
        if bytes_s is not None and not bytes_s > 0:
            raise OffloadError(f"a rate must be positive, got {bytes_s} bytes a second")
        self.bytes_s = bytes_s
        self._lock = threading.Lock()
        self._busy_until = 0.0

    @contextlib.contextmanager
    def spent_on(self, num_bytes: int) -> Iterator[None]:
        """Let what is done inside take as long as so many bytes do, or longer."""
        until = self._book(num_bytes)
        yield
        time.sleep(max(0.0, until - time.monotonic()))

    def _book(self, num_bytes: int) -> float:
        if self.bytes_s is None:
            return 0.0
        with self._lock:
            start = max(time.monotonic(), self._busy_until)
            self._busy_until = start + num_bytes / self.bytes_s
            return self._busy_until


@attrs.frozen(eq=False)
class LaneWork:
    """A move that a lane makes."""

    future: Future[None]

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once it is made; raise what it raised."""
        self.future.result(timeout_s)

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return whether it is made, waiting so long for that."""
        return not wait([self.future], within_s).not_done


class Done:
    """A move with nothing left to wait for."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_done(self, within_s: float = 0.0) -> bool:
        """Return True."""
        return True


class Lane:
    """One thread that makes moves in the order in which they were handed to it.

    Args:
        name: Of the thread.
        pace: What limits its rate; several lanes may share one.
        depth: Moves that may wait or be under way at once; handing over more waits for the oldest,
            so that what they read and write stays bounded. 2 is double buffering.
    """

    def __init__(self, name: str, pace: Pace | None = None, depth: int = 2) -> None:
        self.pace = Pace() if pace is None else pace
        self.moved_bytes = 0
        self._name = name
        self._room = threading.Semaphore(depth)
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def submit(self, job: Callable[[], None], num_bytes: int) -> Work:
        """Let the thread run a job that moves so many bytes."""
        self._room.acquire()
        try:
            with self._lock:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
                    weakref.finalize(self, self._thread.shutdown, wait=False).atexit = False
                self.moved_bytes += num_bytes
                future = self._thread.submit(self._run, job, num_bytes)
        except BaseException:
            self._room.release()
            raise
        return LaneWork(future)

    def copy(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        to_host: bool,
        add: bool = False,
        after: Callable[[], None] | None = None,
    ) -> Work:
        """Copy a tensor, or add it, to another of its size, between a device and the host.

        Both belong to the move until it is waited for. It is the host that waits, also where the
        target is a device's: no stream is told of the move. So offloaded weights, which are fetched
        in the midst of a step, are an exception to the rule that the host does not wait for a
        device there. Bytes travel in the dtype of the device's side; the host converts. Where the
        device is the host's memory it is a plain copy.

        Args:
            source: What is read.
            target: What is written.
            to_host: Whether ``source`` is on the device, rather than ``target``.
            add: Add to what ``target`` holds, on the host.
            after: Called once it is made, also where it fails.
        """
        on_device = source if to_host else target
        num_bytes = on_device.numel() * on_device.itemsize
        if source.device.type == target.device.type == "cpu":
            move = _HostMove(source, target, add, after)
            if self.pace.bytes_s is None:
                self.moved_bytes += num_bytes  # a thread would save nothing
                move()
                return Done()
            return self.submit(move, num_bytes)
        stream = self._stream_of(on_device.device)
        return self.submit(_DeviceMove(source, target, add, after, stream), num_bytes)

    def _run(self, job: Callable[[], None], num_bytes: int) -> None:
        try:
            with self.pace.spent_on(num_bytes), torch.no_grad():
                job()
        finally:
            self._room.release()

    def _stream_of(self, device: torch.device) -> torch.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.get_device_module(device).Stream(device)
            return self._streams[device]


@attrs.frozen(eq=False)
class _HostMove:
    source: torch.Tensor
    target: torch.Tensor
    add: bool
    after: Callable[[], None] | None

    def __call__(self) -> None:
        try:
            with torch.no_grad():
                _put(self.source, self.target, add=self.add)
        finally:
            if self.after is not None:
                self.after()


class _DeviceMove:
    """A move between an accelerator and the host, by way of pinned memory, on a stream."""

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        add: bool,
        after: Callable[[], None] | None,
        stream: torch.Stream,
    ) -> None:
        self._ends = (source, target)
        self._add = add
        self._after = after
        self._stream = stream
        # What the device has been told to do with either tensor comes first.
        self._module = torch.get_device_module(stream.device)
        self._ready = self._module.current_stream(stream.device).record_event()

    def __call__(self) -> None:
        source, target = self._ends
        down = source.device.type != "cpu"
        like = source if down else target
        pinned = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        try:
            if not down:
                pinned.copy_(source)
            with self._module.stream(self._stream):
                self._stream.wait_event(self._ready)
                here, there = (source, pinned) if down else (pinned, target)
                there.copy_(here, non_blocking=True)
            self._stream.synchronize()
            if down:
                _put(pinned, target, add=self._add)
        finally:
            self._ends = (pinned, pinned)  # the device's memory is free now
            if self._after is not None:
                self._after()


def _put(source: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
    if add:
        target.add_(source)
    else:
        target.copy_(source)
