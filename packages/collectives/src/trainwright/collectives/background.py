"""A thread that goes on with operations while their caller computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Step = Callable[[], None]
_T = TypeVar("_T")


class Bystander(threading.Thread):
    """A thread that ends with the process and never does what another one might wait for."""

    def __init__(self, target: Callable[..., None], args: tuple[object, ...], name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)


def within(seconds: float, act: Callable[[], _T], what: str) -> _T:
    """Return what a call returns that may never end, as those to a store whose process hangs.

    Args:
        seconds: how long it is waited for; its thread is left behind after that.
        act: the call.
        what: names it in the error.

    Raises:
        TimeoutError: It has not ended.
        Exception: What the call raises.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = Bystander(target=run, args=(), name=what)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"{what} has not ended within {seconds:g} s")
    return results[0]


class Background:
    """Runs steps one after the other in a thread of its own, made when the first one comes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._steps: queue.SimpleQueue[Step | None] | None = None
        self._thread: threading.Thread | None = None

    def run(self, step: Step) -> None:
        """Run the step after those before it; a step never raises."""
        if self._steps is None:
            self._steps = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_run_steps, args=(self._steps,), name=self._name, daemon=True
            )
            self._thread.start()
        self._steps.put(step)

    def stop(self) -> None:
        """End the thread once its current step is over."""
        if self._steps is not None:
            self._steps.put(None)
            self._steps = None

    def has_ended(self, within_s: float) -> bool:
        """Return whether the thread is over, or there never was one; `stop` it before."""
        thread = self._thread
        # Whoever is collected by the thread itself does not wait for it.
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(within_s)
        return not thread.is_alive()

    def __del__(self) -> None:
        self.stop()


def all_of(members: Iterable[_T]) -> list[_T]:
    """Return the members of a weak set that other threads change meanwhile."""
    while True:
        try:
            return list(members)
        except RuntimeError:
            continue


def _run_steps(steps: queue.SimpleQueue[Step | None]) -> None:
    while (step := steps.get()) is not None:
        step()
        del step
