"""How processes that were started together have ended, and signals that let them end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import attrs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trainwright.checkpointing import CheckpointingError
from trainwright.integration.errors import TrainwrightError
from trainwright.integration.stopping import STOPPED
from trainwright.precision import LossScaleError
from trainwright.stability_guards import GuardError, HaltError

_DECISIONS = (CheckpointingError, GuardError, HaltError, LossScaleError, TrainwrightError)
"""Errors by which a run ends for reasons of its own: started again, it would end so again."""

_LOOK_S = 0.3


@attrs.frozen
class Ending:
    """How workers ended.

    Args:
        code: the exit code of the command.
        reason: for people; empty where the workers have told it.
        lost: ranks that were lost, by no decision of the run.
    """

    code: int
    reason: str = ""
    lost: int = 0


def ending_of(error: ChildFailedError, passed: Sequence[signal.Signals] = ()) -> Ending:
    """Say how workers ended of which one failed.

    Args:
        error: the failure.
        passed: signals that were passed on to the workers.
    """
    failure = min(error.failures.values(), key=_aftermath)
    if failure.exitcode == STOPPED:
        return Ending(STOPPED)
    if passed and failure.exitcode == -passed[0]:
        return Ending(128 + passed[0], f"stopped by {passed[0].name} before it could be saved")
    decided = failure.exitcode == 2 or _message(failure).partition(":")[0] in _names(_DECISIONS)
    code = 2 if failure.exitcode == 2 else 1  # the first says: what was given cannot be used
    return Ending(code, describe_failure(error), lost=0 if passed or decided else 1)


def describe_failure(error: ChildFailedError) -> str:
    """Return one line naming the rank that failed first and its error."""
    rank, failure = min(error.failures.items(), key=lambda item: _aftermath(item[1]))
    return f"rank {rank} failed: {_message(failure)}"


@contextlib.contextmanager
def passing_on(numbers: Collection[signal.Signals]) -> Iterator[list[signal.Signals]]:
    """Pass these signals on to the processes that this one has started.

    Yields what was passed on so far. The second signal is raised instead, and so is the first where
    there is nobody to pass it to.
    """
    passed: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        children = [child.pid for child in multiprocessing.active_children() if child.pid]
        if passed or not children:
            raise SignalException(f"signal {number}", signal.Signals(number))
        passed.append(signal.Signals(number))
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def waking(number: int) -> Iterator[None]:
    """Wake those of so many processes that this one starts meanwhile once one of them has ended.

    A process that is stopped hears of no signal but two until it is woken, so that what should end
    it waits until the patience of whoever sent it is used up. One that runs does not notice.
    """
    is_over = threading.Event()

    def watch() -> None:
        sentinels: dict[int, BaseProcess] = {}
        has_ended = False
        # Where one ends before all are there, those that were seen are all that will be.
        while len(sentinels) < number and not has_ended and not is_over.wait(_LOOK_S):
            sentinels |= {child.sentinel: child for child in multiprocessing.active_children()}
            has_ended = bool(wait(list(sentinels), 0))
        while sentinels and not is_over.is_set():
            # To look at these, and not at the processes, leaves the exit codes to who waits.
            ended = wait(list(sentinels), _LOOK_S)
            for child in sentinels.values():
                if ended and child.sentinel not in ended and child.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGCONT)
            is_over.wait(_LOOK_S)

    thread = threading.Thread(target=watch, name="wake what is stopped", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _aftermath(failure: ProcessFailure) -> tuple[int, float]:
    # A process that was killed, or raised an error of its own, comes before those that stopped
    # because of it.
    if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
        return 0, failure.timestamp
    return (2 if "PeerFailedError" in _message(failure) else 1), failure.timestamp


def _message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    if isinstance(message, dict):
        message = message.get("message", message)
    return str(message).strip() or f"exit code {failure.exitcode}"


def _names(errors: Collection[type[BaseException]]) -> set[str]:
    below = {each for error in errors for each in error.__subclasses__()}
    return {error.__name__ for error in errors} | (_names(below) if below else set())
