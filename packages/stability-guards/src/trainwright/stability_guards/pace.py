"""Ranks that are slow, and ranks that have stopped moving."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from types import TracebackType
from typing import Self

import attrs
import torch

from trainwright.collectives import Communicator
from trainwright.stability_guards.checks import positive, whole
from trainwright.stability_guards.protocol import State


@attrs.frozen
class Straggler:
    """A rank that takes longer than the others.

    Args:
        rank: within the communicator that the seconds come from.
        seconds: what it took.
        median_seconds: what the middle rank took.
    """

    rank: int
    seconds: float
    median_seconds: float

    def __str__(self) -> str:
        ratio = self.seconds / self.median_seconds if self.median_seconds else math.inf
        return f"rank {self.rank} takes {self.seconds:.3g} s, {ratio:.2f} times the median"


def gather_seconds(own_seconds: float, communicator: Communicator) -> list[float]:
    """Return every rank's seconds, in the order of the ranks, on every rank.

    Give the time of a rank's own work, without its waits for others: in a synchronous step all
    ranks take as long as the slowest.

    Communicates:
        One all-gather of 8 bytes a rank; the host waits.
    """
    device = communicator.device
    mine = torch.tensor([own_seconds], dtype=torch.float64, device=device)
    every = torch.empty(communicator.size, dtype=torch.float64, device=device)
    communicator.all_gather(every, mine).wait()
    return [float(value) for value in every.tolist()]


@attrs.frozen
class StragglerWatch:
    """Names ranks that were slow several times in a row; its state is plain data.

    Args:
        factor: slow is more than this many times the median of the ranks.
        in_a_row: observations before a rank is named.
    """

    factor: float = attrs.field(default=1.3, validator=positive)
    in_a_row: int = attrs.field(default=5, validator=whole(1))

    def initial(self) -> State:
        """Return the state before the first observation."""
        return {"slow": {}}

    def update(self, state: State, seconds: Sequence[float]) -> tuple[State, tuple[Straggler, ...]]:
        """Count the slow ranks of one observation; return the ones to name, slowest first.

        Args:
            state: what the last call returned; only ranks that are slow take place in it.
            seconds: one entry a rank, as `gather_seconds` returns them.
        """
        middle = median(seconds)
        slow = {
            str(rank): state["slow"].get(str(rank), 0) + 1
            for rank, value in enumerate(seconds)
            if value > self.factor * middle
        }
        named = [
            Straggler(int(rank), seconds[int(rank)], middle)
            for rank, count in slow.items()
            if count >= self.in_a_row
        ]
        return {"slow": slow}, tuple(sorted(named, key=lambda found: -found.seconds))


@attrs.frozen
class Silence:
    """No step has ended for too long.

    Args:
        step: the last step that ended.
        seconds: since then.
        allowed_seconds: what it might have taken.
    """

    step: int
    seconds: float
    allowed_seconds: float

    def __str__(self) -> str:
        return (
            f"no step has ended for {self.seconds:.1f} s since step {self.step}, "
            f"{self.allowed_seconds:.1f} s are allowed"
        )


class Heartbeat:
    """Calls somebody where steps stop ending, from a thread of its own.

    Watching begins with the first beat, so that start and compilation may take their time. A step
    may take ``factor`` times the median of the last 32, and at least ``least_s``. Use it as a
    context manager, or call ``close``.

    Args:
        on_silence: called once a silence, in the watching thread, such as to abort a communicator
            with the text of the `Silence` as the cause, so that peers stop too.
        factor: how many times longer than usual a step may take.
        least_s: what any step may take.
    """

    def __init__(
        self,
        on_silence: Callable[[Silence], None],
        *,
        factor: float = 10.0,
        least_s: float = 60.0,
    ) -> None:
        self._on_silence = on_silence
        self._factor = factor
        self._least_s = least_s
        self._changed = threading.Condition()
        self._durations: deque[float] = deque(maxlen=32)
        self._last: tuple[int, float] | None = None
        self._told = False
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, step: int) -> None:
        """Say that ``step`` has ended."""
        now = time.monotonic()
        with self._changed:
            if self._last is not None:
                self._durations.append(now - self._last[1])
            self._last = (step, now)
            self._told = False
            self._changed.notify()

    def close(self) -> None:
        """Stop watching; returns once the thread has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _allowed(self) -> float:
        usual = median(self._durations) if self._durations else 0.0
        return max(self._least_s, self._factor * usual)

    def _watch(self) -> None:
        while True:
            with self._changed:
                silence = self._wait()
            if silence is None:
                return
            # Outside of the lock: what is called may take long, or beat, or close.
            self._on_silence(silence)

    def _wait(self) -> Silence | None:
        while not self._closed:
            if self._last is None or self._told:
                self._changed.wait()
                continue
            step, at = self._last
            allowed, since = self._allowed(), time.monotonic() - at
            if since >= allowed:
                self._told = True
                return Silence(step, since, allowed)
            self._changed.wait(allowed - since)
        return None
