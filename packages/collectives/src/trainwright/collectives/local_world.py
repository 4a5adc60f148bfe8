"""Ranks as threads of one process, for tests, debuggers and notebooks."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainwright.collectives.arithmetic import normalize_device
from trainwright.collectives.checked import CheckedCommunicator
from trainwright.collectives.checks import check_timeout
from trainwright.collectives.errors import PeerFailedError, UsageError
from trainwright.collectives.local_group import LocalBackend
from trainwright.collectives.local_members import LocalGroup
from trainwright.collectives.parking import ThreadWorld

# How long peers of a failed rank may take to notice by themselves.
_GRACE_S = 0.8


class LocalWorld:
    """A world of ``size`` ranks that are threads of this process.

    Args:
        size: number of ranks.
        timeout_s: how long a rank waits for the others before it gives up.
        device: where tensors must live; on CUDA each rank has a stream of its own.
        buffered_sends: whether waiting for a send returns before the receiver has come. Gloo and
            NCCL do not promise that, so by default it does not, and programs that rely on it show.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout_s: float = 30.0,
        device: torch.device | str = "cpu",
        buffered_sends: bool = False,
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise UsageError(f"LocalWorld: size={size!r} must be a positive number of ranks")
        check_timeout("LocalWorld", timeout_s)
        self.size = size
        self.timeout_s = timeout_s
        self.device = normalize_device(device)
        self.buffered_sends = buffered_sends

    def __repr__(self) -> str:
        """Name the size and the device."""
        return f"LocalWorld({self.size}, device={str(self.device)!r})"

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``fn(communicator, *args)`` once a rank and return the results by rank.

        Each rank runs with one intra-op thread and computes backward passes in its own thread.

        Raises:
            BaseException: what the first rank to fail raised, with a note naming the rank.
            CollectiveTimeoutError: the ranks wait for each other in vain.
        """
        run = _Run(self, fn, args)
        return run.results()


class _Run:
    """One call of `LocalWorld.run`."""

    def __init__(self, world: LocalWorld, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        self._fn = fn
        self._args = args
        self._device = world.device
        self._shared = ThreadWorld(world.size, world.timeout_s)
        self._group = LocalGroup(self._shared, range(world.size), "world", world.buffered_sends)
        self._results: list[Any] = [None] * world.size
        self._errors: dict[int, BaseException] = {}

    def results(self) -> list[Any]:
        """Run all ranks to their end."""
        shared = self._shared
        shared.threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._enter, rank),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(self._group.size)
        ]
        num_threads = torch.get_num_threads()
        try:
            for thread in shared.threads:
                thread.start()
            shared.settled.acquire()
            if shared.failure is None:
                for thread in shared.threads:
                    thread.join()
        except BaseException as interrupt:
            shared.fail(-1, f"the caller was interrupted by {interrupt!r}")
            raise
        finally:
            if shared.failure is not None:
                self._stop()
            # Threads started later would inherit the ranks' one thread.
            torch.set_num_threads(num_threads)
        if shared.failure is not None:
            raise self._failure(shared.failure)
        return self._results

    def _enter(self, rank: int) -> None:
        with contextlib.suppress(_StopRank):
            self._live(rank)

    def _live(self, rank: int) -> None:
        torch.set_num_threads(1)
        communicator = CheckedCommunicator(LocalBackend(self._group, rank, self._device))
        try:
            with torch.autograd.set_multithreading_enabled(False):
                if self._device.type == "cuda":
                    stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                    with torch.cuda.stream(stream):
                        self._results[rank] = self._fn(communicator, *self._args)
                        torch.cuda.current_stream(self._device).synchronize()
                else:
                    self._results[rank] = self._fn(communicator, *self._args)
        except BaseException as error:
            self._errors[rank] = error
            self._shared.fail(rank, f"{type(error).__name__}: {error}")
        finally:
            self._shared.leave()

    def _stop(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        for thread in self._shared.threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for _ in range(2):
            late = [thread for thread in self._shared.threads if thread.is_alive()]
            for thread in late:
                _interrupt(thread)
            for thread in late:
                thread.join(_GRACE_S)

    def _failure(self, failure: tuple[int, str]) -> BaseException:
        rank, cause = failure
        error = self._errors.get(rank)
        if error is None:
            return PeerFailedError(rank, cause)
        error.add_note(f"on rank {rank}")
        for other, also in sorted(self._errors.items()):
            if other != rank and not isinstance(also, PeerFailedError | _StopRank):
                error.add_note(f"rank {other} failed as well: {type(also).__name__}: {also}")
        for thread in self._shared.threads:
            if thread.is_alive():
                error.add_note(f"the thread of {thread.name} could not be stopped")
        return error


class _StopRank(BaseException):
    """Raised inside a rank that computes on although another one has failed."""


def _interrupt(thread: threading.Thread) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_StopRank)
    )
