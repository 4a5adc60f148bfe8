"""When operations ran: by the host's clock, or by events that an accelerator's stream passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from trainwright.pipeline_schedules.execute.program import Instruction
from trainwright.pipeline_schedules.execute.result import Timed


class Stopwatch(Protocol):
    """Takes down when each operation of one run began and ended."""

    @property
    def began_s(self) -> float:
        """When the run began, by the host's clock, `time.perf_counter`."""
        ...

    def start(self) -> None:
        """An operation begins."""
        ...

    def stop(self, instruction: Instruction) -> None:
        """It has ended; this is what it was."""
        ...

    def read(self) -> tuple[Timed, ...]:
        """Return all operations in order; waits for a device to end them."""
        ...


class HostStopwatch:
    """The host's clock: right where the host does the work."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self._start = 0.0
        self._seen: list[Timed] = []

    def start(self) -> None:
        """Note the time."""
        self._start = time.perf_counter() - self.began_s

    def stop(self, instruction: Instruction) -> None:
        """Note the time again."""
        self._seen.append(_timed(instruction, self._start, time.perf_counter() - self.began_s))

    def read(self) -> tuple[Timed, ...]:
        """Return all operations in order."""
        return tuple(self._seen)


class StreamStopwatch:
    """Events between the operations on the current stream of an accelerator.

    The host hands work out far ahead of its being done; an event has the time of its being passed.

    Args:
        make_event: Makes one, as `torch.cuda.Event` does.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self.began_s = time.perf_counter()
        self._first = self._pass_event()
        self._start = self._first
        self._seen: list[tuple[Instruction, Any, Any]] = []

    def start(self) -> None:
        """Let the stream pass an event."""
        self._start = self._pass_event()

    def stop(self, instruction: Instruction) -> None:
        """Let the stream pass another one."""
        self._seen.append((instruction, self._start, self._pass_event()))

    def read(self) -> tuple[Timed, ...]:
        """Return all operations in order, once the last of them is done."""
        if self._seen:
            self._seen[-1][2].synchronize()
        return tuple(
            _timed(instruction, self._seconds(start), self._seconds(stop))
            for instruction, start, stop in self._seen
        )

    def _seconds(self, event: Any) -> float:
        return float(self._first.elapsed_time(event)) / 1e3

    def _pass_event(self) -> Any:
        event = self._make_event()
        event.record()
        return event


def stopwatch_for(device: torch.device) -> Stopwatch:
    """Return what measures work on a device."""
    if device.type != "cuda":
        return HostStopwatch()
    return StreamStopwatch(partial(torch.cuda.Event, enable_timing=True))


def _timed(instruction: Instruction, start_s: float, stop_s: float) -> Timed:
    slot = (instruction.stage, instruction.microbatch)
    return Timed(instruction.operation.value, *slot, start_s, stop_s)
