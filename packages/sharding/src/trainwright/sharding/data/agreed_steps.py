"""What all ranks do once a step, wherever each of them stands in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from trainwright.sharding.data.driving import UnitDriver
from trainwright.sharding.data.errors import LifecycleError
from trainwright.sharding.data.reducer import Reducer

Check = Callable[[], None]
"""Raises on every rank if gradients must not be reduced as they are."""


class AgreedSteps:
    """The two agreements of a step and its reductions, so that a broken step ends on all ranks.

    Args:
        driver: Compares passes.
        reducer: Reduces.
        check: Looks for missing gradients.
    """

    def __init__(self, driver: UnitDriver, reducer: Reducer, check: Check) -> None:
        self._driver = driver
        self._reducer = reducer
        self._check = check
        self._is_compared = False
        self._is_checked = False

    def begin(self) -> None:
        """Begin a step."""
        self._is_compared = self._is_checked = False

    @property
    def compares_later(self) -> bool:
        """Whether passes are compared after reductions that others may wait for, not before."""
        return self._reducer.waits_for_backwards

    def compare(self) -> None:
        """Compare passes; what it raises, it raises on all ranks."""
        if not self._is_compared:
            self._is_compared = True
            try:
                self._driver.compare()
            except LifecycleError:
                self._is_checked = True  # nobody comes as far
                raise

    def check(self) -> None:
        """Look for missing gradients; what it raises, it raises on all ranks."""
        if not self._is_checked:
            self._is_checked = True
            self._check()

    def join_broken(self) -> None:
        """Do what other ranks may wait for, from where this rank stands in the step."""
        self._driver.reset()
        with suppress(LifecycleError):
            if not self.compares_later:
                self.compare()
            self.check()
        self._reducer.join_all()
        if self.compares_later:
            with suppress(LifecycleError):
                self.compare()
        self._reducer.await_all()
